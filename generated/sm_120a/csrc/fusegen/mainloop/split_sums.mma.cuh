// What the MMAs of a warp add to: sums of 128 products, which are added up in fp32 registers, as they
// are or times the scales of their blocks. See mainloop/running_sums.mma.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/padded_tokens.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Of one tile, each of `Stages` stages. `Factors` has
//   join(total, part, strip, i)   value i of a strip's total, with that of the partial sum
//   advance()                     goes on to the next partial sum
template <class Values, int Stages, class Factors>
class PartialSums {
 public:
  __device__ PartialSums(const Values& total, const Factors& factors)
      : total_(total), factors_(factors) {}

  __device__ auto& accumulators() { return partial_; }

  __device__ void end_stage(bool last) {
    if (++stages_ < Stages && !last) return;
    stages_ = 0;
#pragma unroll
    for (int strip = 0; strip < Values::kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < Values::kCount; ++i) {
        float& total = total_.values[strip][i];
        total = factors_.join(total, partial_[strip][i], strip, i);
        partial_[strip][i] = 0.f;
      }
    }
    factors_.advance();
  }

 private:
  const Values& total_;
  float partial_[Values::kStrips][Values::kCount] = {};
  Factors factors_;
  int stages_ = 0;  // that are in the partial sums
};

struct NoFactors {
  __device__ float join(float total, float part, int, int) const { return total + part; }
  __device__ void advance() {}
};

struct SplitWarpSums {
  static constexpr int kInterval = kScaleBlock;

  template <class Config, class Values>
  __device__ auto begin(const Values& total, const Tile&, Place, int32_t) const {
    return PartialSums<Values, kInterval / Config::tile_k, NoFactors>(total, NoFactors());
  }
};

// Scales of A's rows: of this lane's two in every strip. `left` rows exist from its first on, and
// nothing is read for others.
template <class Values>
struct RowScales {
  const float* next;  // of this lane's first row, in the block to come
  int32_t step;       // to the block after it
  int32_t left;
  float values[Values::kStrips][2] = {};

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t row = i / 2 * Values::kStripStep + i % 2 * 8;
      if (row < left) values[i / 2][i % 2] = __ldg(next + row);
    }
    next += step;
  }
  __device__ float of(int strip, int i) const { return values[strip][i / 2 % 2]; }
};

// The scale of 128 x 128 of a weight, of which a warp multiplies one at a time.
struct WeightScale {
  const float* next;
  int32_t step;
  float value = 0.f;

  __device__ void load() {
    value = __ldg(next);
    next += step;
  }
  __device__ float of(int) const { return value; }
};

// Scales of B's rows, which are columns of the result: of this lane's two in every eight.
template <class Values>
struct ColumnScales {
  const float* next;
  int32_t step;
  int32_t left;
  float2 values[Values::kCount / 4] = {};

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < Values::kCount / 4; ++i) {
      if (i * 8 < left) values[i] = __ldg(reinterpret_cast<const float2*>(next + i * 8));
    }
    next += step;
  }
  __device__ float of(int i) const { return i % 2 == 0 ? values[i / 4].x : values[i / 4].y; }
};

// Those of one block along the contraction; they come while the block before it is multiplied.
template <class Rows, class Columns>
class BlockFactors {
 public:
  __device__ BlockFactors(int32_t count, const Rows& rows, const Columns& columns)
      : left_(count), rows_(rows), columns_(columns) {
    advance();
  }

  __device__ void advance() {
    if (left_ == 0) return;
    --left_;
    rows_.load();
    columns_.load();
  }
  __device__ float join(float total, float part, int strip, int i) const {
    return fmaf(part, rows_.of(strip, i) * columns_.of(i), total);
  }

 private:
  int32_t left_;  // blocks to load
  Rows rows_;
  Columns columns_;
};

// Row-major; each row is of one block along the contraction, but for those of weights, which are a
// matrix per group, as the weight is stored.
struct BlockScaleArrays {
  const float* a;
  const float* b;
  int32_t pitch_a, pitch_b;  // from row to row
  int32_t rows_b;            // of one weight's
};

template <Gemm kind>
struct ScaledWarpSums {
  static constexpr int kInterval = kScaleBlock;

  const BlockScaleArrays& scales;

  template <class Config, class Values>
  __device__ auto begin(const Values& total, const Tile& tile, Place place,
                        int32_t columns) const {
    using Rows = RowScales<Values>;
    const bool exists = place.row < tile.rows && place.column < columns;
    const int32_t count = exists ? int32_t(blocks(tile.k, kScaleBlock)) : 0;
    const int32_t lane_row = place.row + total.row(0, 0);
    const float* const a = scales.a + first_row_of_a(tile) + tile.row + lane_row;
    const Rows rows{a, scales.pitch_a, tile.rows - lane_row};
    if constexpr (kind == Gemm::wgrad) {
      const int32_t column = place.column + total.column(0);
      const float* const b = scales.b + first_scale_block(tile) * int64_t(scales.pitch_b) + column;
      const ColumnScales<Values> of_columns{b, scales.pitch_b, columns - column};
      return partial_sums<Config>(total, BlockFactors(count, rows, of_columns));
    } else {
      static_assert(kScaleBlock % Values::kColumns == 0, "a warp's columns share a scale");
      constexpr bool kForward = kind == Gemm::fprop;
      const int32_t block = place.column / kScaleBlock;
      const int64_t row = int64_t(tile.group) * scales.rows_b + (kForward ? block : 0);
      const float* const b = scales.b + row * scales.pitch_b + (kForward ? 0 : block);
      const WeightScale weight{b, kForward ? 1 : scales.pitch_b};
      return partial_sums<Config>(total, BlockFactors(count, rows, weight));
    }
  }

 private:
  // Where the scales of a group's first row and block begin.
  __device__ int64_t first_row_of_a(const Tile& tile) const {
    if constexpr (kind == Gemm::wgrad) return first_scale_block(tile) * int64_t(scales.pitch_a);
    return padded_begin(tile);
  }

  template <class Config, class Values, class Factors>
  __device__ static auto partial_sums(const Values& total, const Factors& factors) {
    return PartialSums<Values, kInterval / Config::tile_k, Factors>(total, factors);
  }
};

}  // namespace fusegen
