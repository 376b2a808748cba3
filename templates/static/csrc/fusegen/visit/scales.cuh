// Scales that are constant along the contraction: they multiply the finished product.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// One factor of a whole tile.
struct TileFactor {
  static constexpr bool kWhole = true;

  float value;

  template <class Values>
  __device__ void visit(const Values& fragment, const Tile&, Place) const {
#pragma unroll
    for (int strip = 0; strip < Values::kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < Values::kCount; ++i) fragment.values[strip][i] *= value;
    }
  }
};

// A scale of each operand, or of each operand and group.
struct TensorScales {
  const float* a;
  const float* b;
  int32_t step_a;  // 1: one per group, 0: one for all
  int32_t step_b;

  template <class Values>
  __device__ TileFactor begin(const Tile& tile, Place, int32_t, uint32_t) const {
    if (tile.k == 0) return {0.f};
    return {__ldg(a + tile.group * step_a) * __ldg(b + tile.group * step_b)};
  }
};

// A factor of each row and of each column. A lane keeps those of 2 of every 64 columns and hands
// them round.
template <class Values>
struct RowAndColumnFactors {
  static constexpr bool kWhole = true;
  static constexpr int kBlocks = Values::kColumns / 64;
  static_assert(Values::kColumns % 64 == 0);

  float rows[Values::kStrips][2];  // of this lane's two rows in every strip
  float2 columns[kBlocks];         // of columns 2 lane and 2 lane + 1 of every 64

  __device__ void visit(const Values& fragment, const Tile&, Place) const {
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < Values::kCount; i += 4) {  // 8 columns
      const int owner = i / 4 % 8 * 4 + int(fragment.lane % 4);
      const float x = __shfl_sync(kAll, columns[i / 32].x, owner);
      const float y = __shfl_sync(kAll, columns[i / 32].y, owner);
#pragma unroll
      for (int strip = 0; strip < Values::kStrips; ++strip) {
        float* const out = fragment.values[strip] + i;
        out[0] = out[0] * rows[strip][0] * x;
        out[1] = out[1] * rows[strip][0] * y;
        out[2] = out[2] * rows[strip][1] * x;
        out[3] = out[3] * rows[strip][1] * y;
      }
    }
  }
};

// A scale of each row of A and of each row of B, which is a column of the result.
template <Gemm kind>
struct RowAndColumnScales {
  const float* a;
  const float* b;
  int32_t rows_a;  // wgrad: rows of A in one group

  template <class Values>
  __device__ RowAndColumnFactors<Values> begin(const Tile& tile, Place place, int32_t columns,
                                               uint32_t lane) const {
    RowAndColumnFactors<Values> out{};
    if (tile.k == 0) return out;
    const float* const first =
        a + (kind == Gemm::wgrad ? int64_t(tile.group) * rows_a : int64_t(tile.begin)) + tile.row;
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t at = place.row + i / 2 * Values::kStripStep + i % 2 * 8 + int32_t(lane / 4);
      if (at < tile.rows) out.rows[i / 2][i % 2] = __ldg(first + at);
    }
    const float* const factors = b + int64_t(tile.group) * columns + place.column;
#pragma unroll
    for (int i = 0; i < Values::kColumns / 64; ++i) {
      const int32_t at = i * 64 + int32_t(lane) * 2;
      if (at < columns - place.column) {
        out.columns[i] = __ldg(reinterpret_cast<const float2*>(factors + at));
      }
    }
    return out;
  }
};

}  // namespace fusegen
