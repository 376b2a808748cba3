// What becomes of the halves of a result's row, once they are rounded: a gated activation.
//
// Such a change has
//   kOfRows                    whether it takes a value of the row, too
//   begin(tile)                gives what is called for a tile's results
// and what that gives is called with 32 bits of each half, two neighbours of a row, and with the
// row's value (anything where none is taken).
#pragma once

#include <array>
#include <cstdint>

#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/pointwise/slot.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A printed expression `Math` of both halves, its operands `First` and `Second`, and at most of an
// fp32 value of the row. Rows that no group has are zero, and stay so.
template <class Element, class Math, int First, int Second>
struct Gated {
  static constexpr int kOperands = Math::operand_count;
  static constexpr bool kLoads = false;
  static constexpr bool kOfRows = kOperands > 2;
  static constexpr int kRow = kOfRows ? 3 - First - Second : 0;
  static_assert(kOperands <= 3 && First != Second && Math::result_count == 1);

  static constexpr bool is(Slot slot, Access access, bool wide = false) {
    return slot.access == access && slot.wide == wide;
  }
  static_assert(is(Math::operand(First), Access::first_half) &&
                    is(Math::operand(Second), Access::second_half) &&
                    is(Math::result(0), Access::full) &&
                    (!kOfRows || is(Math::operand(kRow), Access::row, true)),
                "halves and a result in the result's type, an fp32 value of a row");

  std::array<float, kMostScalars> scalars;

  struct OfTile {
    const Gated& gated;
    bool exists;

    __device__ uint32_t operator()(uint32_t first, uint32_t second, float row) const {
      const uint32_t out = gated.apply(first, second, row);
      return exists ? out : 0;
    }
  };

  __device__ OfTile begin(const Tile& tile) const { return {*this, tile.k != 0}; }

 private:
  __device__ uint32_t apply(uint32_t first, uint32_t second, float row) const {
    using Pair = typename PairOf<Element>::type;
    const float2 a = widen_pair(reinterpret_cast<const Pair&>(first));
    const float2 b = widen_pair(reinterpret_cast<const Pair&>(second));
    return round_pair(of_one(a.x, b.x, row), of_one(a.y, b.y, row), Element());
  }

  __device__ float of_one(float first, float second, float row) const {
    float in[kOperands], out[1];
    if constexpr (kOfRows) in[kRow] = row;
    in[First] = first;
    in[Second] = second;
    Math::apply(in, out, scalars.data());
    return out[0];
  }
};

}  // namespace fusegen
