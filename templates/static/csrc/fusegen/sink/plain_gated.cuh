// Gated results -> a slab of shared memory -> rows of global memory by ordinary stores: a warp has
// the same columns of both halves of a row, and stores what an expression makes of them. The halves
// go to memory, too, where somebody asks for that.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/sink/gated.cuh"
#include "fusegen/sink/slab.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// How one warp stores its part of every tile, of which it has `Values`. Parts are so narrow that both
// halves lie in the slab side by side.
template <class Result, class Values, class Change>
class PlainGatedSink {
 public:
  static constexpr int kHalf = Values::kColumns / 2;
  static constexpr int kColumns = kHalf < 32 ? kHalf : 32;  // of a part
  static constexpr int kParts = kHalf / kColumns;           // of a strip, of a half
  static_assert(sizeof(Result) == 2 && kColumns >= 16 && kParts * kColumns == kHalf);

  // `columns`: of both halves; `row_values` has [tokens] where the change is of them, `aux` gets the
  // halves, unless nobody asks.
  __device__ PlainGatedSink(void* d, uint8_t* slab, int32_t, int32_t columns, uint32_t lane,
                            const void* row_values, void* aux, const Change& change)
      : d_(static_cast<Result*>(d)),
        row_values_(static_cast<const float*>(row_values)),
        aux_(static_cast<Result*>(aux)),
        slab_{slab},
        columns_(columns),
        lane_(lane),
        change_(change) {}

  __device__ void start(const Tile&, Place) {}
  __device__ void drain() {}

  // 16 rows by kColumns columns of both halves, from `place` on in the first one.
  __device__ void put(const Fragment<kColumns>& first, const Fragment<kColumns>& second,
                      const Tile& tile, Place place) {
    const int32_t half = columns_ / 2, column = place.column + unit() * kUnit;
    const int32_t mine = column < half ? tile.rows - place.row - row() : 0;  // rows below the lane's
    const int64_t at = int64_t(tile.begin) + tile.row + place.row + row();
    float values[kCount] = {};
    if constexpr (Change::kOfRows) load(values, row_values_ + at, mine);
    fill(first, 0);
    fill(second, kSecond);
    __syncwarp();
    const auto change = change_.begin(tile);
    // An expression may take many registers, of which sums of other parts leave few.
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if (i * kRowStep >= mine) continue;
      const uint4 a = slab_.unit(row() + i * kRowStep, unit() * kUnit);
      const uint4 b = slab_.unit(row() + i * kRowStep, unit() * kUnit + kSecond);
      const int64_t next = at + i * kRowStep;
      if (aux_ != nullptr) {
        Result* const to = aux_ + next * columns_ + column;
        *reinterpret_cast<uint4*>(to) = a;
        *reinterpret_cast<uint4*>(to + half) = b;
      }
      const float value = i == 0 ? values[0] : values[kCount - 1];
      *reinterpret_cast<uint4*>(d_ + next * half + column) =
          uint4{change(a.x, b.x, value), change(a.y, b.y, value), change(a.z, b.z, value),
                change(a.w, b.w, value)};
    }
    __syncwarp();
  }

 private:
  static constexpr int kSecond = 32;                 // where the second half begins in the slab
  static constexpr int kUnit = Slab<2>::kUnit;
  static constexpr int kUnits = kColumns / kUnit;    // of a row of a half
  static constexpr int kRowStep = 32 / kUnits;       // rows that the warp stores at once
  static constexpr int kCount = 16 / kRowStep;
  static_assert(kCount == 1 || kCount == 2);

  __device__ int32_t unit() const { return int32_t(lane_ % kUnits); }
  // Eight neighbouring lanes have rows that are permuted into different banks.
  __device__ int32_t row() const {
    const uint32_t eight = lane_ / 8;
    return int32_t(lane_ % 8 / kUnits * kUnits + eight % kUnits + eight / kUnits * 8);
  }

  __device__ static void load(float (&values)[kCount], const float* from, int32_t mine) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i * kRowStep < mine) values[i] = __ldg(from + i * kRowStep);
    }
  }

  __device__ void fill(const Fragment<kColumns>& part, int32_t from) const {
    part.for_each_pair([&](int32_t row, int32_t column, float first, float second) {
      *reinterpret_cast<uint32_t*>(slab_.at(row, from + column)) =
          round_pair(first, second, Result());
    });
  }

  Result* d_;
  const float* row_values_;
  Result* aux_;
  Slab<2> slab_;
  int32_t columns_;
  uint32_t lane_;
  Change change_;
};

// All of a warp's fragment that the tile and the gated result have, whose half has `columns`; `place`
// is that of the fragment's first half. Visitors see either half where it stands in the row before.
template <class Values, class Visitors, class Sink>
__device__ void store_warp_halves(const Values& fragment, Visitors& visitors, Sink& sink,
                                  const Tile& tile, Place place, int32_t columns) {
  constexpr int kWidth = Sink::kColumns, kParts = Sink::kParts;
#pragma unroll
  for (int strip = 0; strip < Values::kStrips; ++strip) {
    const int32_t row = place.row + strip * Values::kStripStep;
    if (row >= tile.rows) return;
#pragma unroll
    for (int index = 0; index < kParts; ++index) {
      const Place at{row, place.column + index * kWidth};
      if (at.column >= columns) break;
      const auto first = fragment.template part<kWidth>(strip, index);
      const auto second = fragment.template part<kWidth>(strip, kParts + index);
      visitors.visit(first, tile, at);
      visitors.visit(second, tile, Place{row, columns + at.column});
      sink.put(first, second, tile, at);
    }
  }
}

}  // namespace fusegen
