// What becomes of results that are rounded, on their way to memory.
//
// A change has
//   kLoads         whether it takes what a tensor has in the result's place
//   begin(tile)    gives what is called for a tile's results
// and what that gives is called with 32 bits of results, two neighbours of a row or one of fp32,
// and with those of the other tensor (anything where none is taken).
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/pointwise/slot.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Nothing.
struct Keep {
  static constexpr bool kLoads = false;

  __device__ Keep begin(const Tile&) const { return {}; }
  __device__ uint32_t operator()(uint32_t word, uint32_t) const { return word; }
};

// What memory holds is added, in the type of the results.
template <class Result>
struct Add {
  static constexpr bool kLoads = true;

  __device__ Add begin(const Tile&) const { return {}; }
  __device__ uint32_t operator()(uint32_t word, uint32_t old) const {
    if constexpr (std::is_same_v<Result, float>) {
      return __float_as_uint(__uint_as_float(old) + __uint_as_float(word));
    } else {
      return add_pairs<Result>(old, word);
    }
  }
};

// A printed expression `Math` of the result, which is its operand `Of`, and at most of one element
// of another tensor; its scalars follow on `FirstScalar` others.
template <class Math, int Of, int FirstScalar>
struct Expression {
  static constexpr int kOperands = Math::operand_count;
  static constexpr bool kLoads = kOperands > 1;
  static_assert(kOperands <= 2 && Of < kOperands && Math::result_count == 1);

  static constexpr bool is_element(Slot slot) { return slot.access == Access::full && !slot.wide; }
  static_assert(is_element(Math::operand(Of)) && is_element(Math::operand(kOperands - 1 - Of)) &&
                    is_element(Math::result(0)),
                "elements of one shape in the result's type");

  __device__ static float apply(float result, float other, const float* scalars) {
    float in[kOperands], out[1];
    if constexpr (kLoads) in[1 - Of] = other;
    in[Of] = result;
    Math::apply(in, out, scalars + FirstScalar);
    return out[0];
  }
};

// Expressions, each of what the one before it gives, rounded in between as separate kernels would.
// Rows that no group has are zero, and stay so.
template <class Element, class... Each>
struct Expressions {
  static constexpr bool kLoads = (... || Each::kLoads);
  static_assert((int(Each::kLoads) + ...) <= 1, "one other tensor");

  std::array<float, kMostScalars> scalars;

  struct OfTile {
    const Expressions& each;
    bool exists;

    __device__ uint32_t operator()(uint32_t word, uint32_t other) const {
      uint32_t out = word;
      ((out = each.template apply<Each>(out, other)), ...);
      return exists ? out : word;
    }
  };

  __device__ OfTile begin(const Tile& tile) const { return {*this, tile.k != 0}; }

 private:
  template <class One>
  __device__ uint32_t apply(uint32_t word, uint32_t other) const {
    using Pair = typename PairOf<Element>::type;
    const float2 result = widen_pair(reinterpret_cast<const Pair&>(word));
    const float2 beside = widen_pair(reinterpret_cast<const Pair&>(other));
    return round_pair(One::apply(result.x, beside.x, scalars.data()),
                      One::apply(result.y, beside.y, scalars.data()), Element());
  }
};

}  // namespace fusegen
