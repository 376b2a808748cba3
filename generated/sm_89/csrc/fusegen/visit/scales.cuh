// Scales that are constant along the contraction: they multiply the finished sums.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// One factor of a whole tile.
struct TileFactor {
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
  static constexpr int kBlocks = (Values::kColumns + 63) / 64;

  float rows[Values::kStrips][2];  // of this lane's two rows in every strip
  float2 columns[kBlocks];         // of columns 2 lane and 2 lane + 1 of every 64

  // `a` has a factor of each row of A, `rows_a` of them in a group of wgrad's.
  template <Gemm kind>
  __device__ void load_rows(const float* a, int32_t rows_a, const Tile& tile, Place place,
                            uint32_t lane) {
    const float* const first =
        a + (kind == Gemm::wgrad ? int64_t(tile.group) * rows_a : int64_t(tile.begin)) + tile.row;
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t at = place.row + i / 2 * Values::kStripStep + i % 2 * 8 + int32_t(lane / 4);
      if (at < tile.rows) rows[i / 2][i % 2] = __ldg(first + at);
    }
  }

  // `b` has a factor of each of the result's `width` columns in a group.
  __device__ void load_columns(const float* b, const Tile& tile, Place place, int32_t width,
                               uint32_t lane) {
    const float* const factors = b + int64_t(tile.group) * width + place.column;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int32_t at = i * 64 + int32_t(lane) * 2;
      if (at < width - place.column) {
        columns[i] = __ldg(reinterpret_cast<const float2*>(factors + at));
      }
    }
  }

  __device__ void set_rows(float factor) {
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) rows[i / 2][i % 2] = factor;
  }

  __device__ void set_columns(float factor) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) columns[i] = {factor, factor};
  }

  template <class Part>
  __device__ void visit(const Part& part, const Tile&, Place) const {
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < Part::kCount; i += 4) {  // 8 columns
      const int at = part.first_column / 2 + i;
      const int owner = at / 4 % 8 * 4 + int(part.lane % 4);
      const float x = __shfl_sync(kAll, columns[at / 32].x, owner);
      const float y = __shfl_sync(kAll, columns[at / 32].y, owner);
#pragma unroll
      for (int strip = 0; strip < Part::kStrips; ++strip) {
        const float(&factors)[2] = rows[part.first_strip + strip];
        float* const out = part.values[strip] + i;
        out[0] = out[0] * factors[0] * x;
        out[1] = out[1] * factors[0] * y;
        out[2] = out[2] * factors[1] * x;
        out[3] = out[3] * factors[1] * y;
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
    out.template load_rows<kind>(a, rows_a, tile, place, lane);
    out.load_columns(b, tile, place, columns, lane);
    return out;
  }
};

}  // namespace fusegen
