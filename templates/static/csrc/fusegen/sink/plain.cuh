// Fragments -> a slab of shared memory -> rows of global memory by ordinary stores.
//
// Of what sink/slab.cuh says a lane stores 16 bytes, eight lanes a row. Results that meet what a
// tensor has in their place read its 16 bytes first. Rows past the group's end and columns past the
// result's are not touched.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/slab.cuh"
#include "fusegen/sink/stored.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// How one warp stores its part of every tile, `Columns` wide: see sink/store_fragment.cuh.
template <class Element, Store store, bool Ragged, int Columns, class Change = Keep>
class PlainSink {
 public:
  using Result = Stored<Element, store>;
  static constexpr int kUnit = Slab<sizeof(Result)>::kUnit;
  static constexpr int kColumns = Columns < 8 * kUnit ? Columns : 8 * kUnit;  // of one put
  static_assert(Columns % kColumns == 0 && 32 % (kColumns / kUnit) == 0);

  // `rows`, `columns`: of a group's result where those are no tokens, and of every result; `other`
  // has what `change` loads, `aux` gets what it changes, unless nobody asks.
  __device__ PlainSink(void* d, uint8_t* slab, int32_t rows, int32_t columns, uint32_t lane,
                       const void* other, void* aux, const Change& change)
      : d_(static_cast<Result*>(d)),
        other_(static_cast<const Result*>(other)),
        aux_(static_cast<Result*>(aux)),
        slab_{slab},
        rows_(rows),
        columns_(columns),
        lane_(lane),
        change_(change) {}

  __device__ void start(const Tile&, Place) {}
  __device__ void drain() {}
  template <class Use>
  __device__ void with(Use use) {
    use(*this);
  }

  // 16 rows by kColumns columns from `place` on.
  __device__ void put(const Fragment<kColumns>& part, const Tile& tile, Place place) {
    const int32_t left = tile.rows - place.row;
    const int64_t first = Ragged ? int64_t(tile.begin) : int64_t(tile.group) * rows_;
    const int32_t column = place.column + int32_t(unit()) * kUnit;
    const int64_t at = (first + tile.row + place.row + row()) * columns_ + column;
    Result* const to = d_ + at;
    const int32_t mine = column < columns_ ? left - int32_t(row()) : 0;  // rows below this lane's
    uint4 others[kCount] = {};
    if constexpr (Change::kLoads) load(others, other_ + at, mine);
    fill(part);
    __syncwarp();
    const auto change = change_.begin(tile);
#pragma unroll kUnrolled
    for (int i = 0; i < kCount; ++i) {
      if (i * kRowStep >= mine) continue;
      const uint4 out = slab_.unit(row() + i * kRowStep, unit() * kUnit);
      const uint4 other = others[i];
      const int64_t next = int64_t(i * kRowStep) * columns_;
      if (has_aux(store) && aux_ != nullptr) *reinterpret_cast<uint4*>(aux_ + at + next) = out;
      *reinterpret_cast<uint4*>(to + next) =
          uint4{change(out.x, other.x), change(out.y, other.y), change(out.z, other.z),
                change(out.w, other.w)};
    }
    __syncwarp();
  }

 private:
  static constexpr int kUnits = kColumns / kUnit;   // of a row
  static constexpr int kRowStep = 32 / kUnits;      // rows that the warp stores at once
  static constexpr int kCount = 16 / kRowStep;
  // An expression may take many registers, of which sums of other parts leave few.
  static constexpr int kUnrolled = changes(store) && !Change::kLoads ? 1 : kCount;

  __device__ uint32_t row() const { return lane_ / kUnits; }
  __device__ uint32_t unit() const { return lane_ % kUnits; }

  __device__ void load(uint4 (&others)[kCount], const Result* from, int32_t mine) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i * kRowStep >= mine) continue;
      others[i] = *reinterpret_cast<const uint4*>(from + int64_t(i * kRowStep) * columns_);
    }
  }

  __device__ void fill(const Fragment<kColumns>& part) const {
    part.for_each_pair([&](int32_t row, int32_t column, float first, float second) {
      uint8_t* const to = slab_.at(row, column);
      if constexpr (is_wide(store)) {
        *reinterpret_cast<float2*>(to) = float2{first, second};
      } else {
        *reinterpret_cast<uint32_t*>(to) = round_pair(first, second, Element());
      }
    });
  }

  Result* d_;
  const Result* other_;
  Result* aux_;
  Slab<sizeof(Result)> slab_;
  int32_t rows_, columns_;
  uint32_t lane_;
  Change change_;
};

}  // namespace fusegen
