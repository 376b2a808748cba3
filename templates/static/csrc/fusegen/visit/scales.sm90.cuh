// Scales of FP8 products: those that are constant along the contraction multiply the finished
// accumulators, block scales multiply every partial sum of 128 products.
#pragma once

#include <cstdint>

#include "fusegen/gemm/config_fp8.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"

namespace fusegen {

// A group's first token in the padded token space of gemm_fp8.h.
__device__ inline int32_t padded_begin(const Tile& tile) {
  return kTokenAlignment * (tile.begin / kTokenAlignment + tile.group);
}

// The row of the scales of a group's first block of tokens.
__device__ inline int32_t first_scale_block(const Tile& tile) {
  return tile.begin / kScaleBlock + tile.group;
}

// Issued where it stands: the compiler would otherwise delay it until the value is wanted.
__device__ inline float load_global_early(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// ---- scales that are constant along the contraction ----

struct TileFactor {
  float value;

  template <int Waves, int N>
  __device__ void apply(Accumulators<Waves, N>& d) const {
#pragma unroll
    for (int wave = 0; wave < Waves; ++wave) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d.values[wave][i] *= value;
    }
  }
};

// Read before the contraction, which hides how long that takes; a lane keeps 2 of every 64 columns'
// factors and hands them round.
template <int Waves, int N>
struct RowAndColumnFactors {
  float rows[Waves][2];    // of this thread's two rows in every wave
  float2 columns[N / 64];  // of columns 2 lane and 2 lane + 1 of every 64
  uint32_t lane;

  __device__ void apply(Accumulators<Waves, N>& d) const {
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const int owner = i % 8 * 4 + int(lane % 4);
      const float x = __shfl_sync(kAll, columns[i / 8].x, owner);
      const float y = __shfl_sync(kAll, columns[i / 8].y, owner);
#pragma unroll
      for (int wave = 0; wave < Waves; ++wave) {
        float* const out = d.values[wave] + i * 4;
        out[0] = out[0] * rows[wave][0] * x;
        out[1] = out[1] * rows[wave][0] * y;
        out[2] = out[2] * rows[wave][1] * x;
        out[3] = out[3] * rows[wave][1] * y;
      }
    }
  }
};

// Kernel parameters of each mode.
template <Gemm kind, Fp8Scaling scaling>
struct Scales;

template <Gemm kind>
struct Scales<kind, Fp8Scaling::tensor> {
  const float* a;
  const float* b;
  int32_t step_a;  // 1: one per group, 0: one for all
  int32_t step_b;

  template <int Waves, int N>
  __device__ TileFactor of(const Tile& tile, int32_t, int32_t, uint32_t) const {
    if (tile.depth == 0) return {0.f};
    return {__ldg(a + tile.group * step_a) * __ldg(b + tile.group * step_b)};
  }
};

template <Gemm kind>
struct Scales<kind, Fp8Scaling::row> {
  const float* a;
  const float* b;
  int32_t rows_a;  // wgrad: rows of A in one group

  // `row` counts from the tile's first.
  template <int Waves, int N>
  __device__ RowAndColumnFactors<Waves, N> of(const Tile& tile, int32_t row, int32_t columns,
                                              uint32_t lane) const {
    RowAndColumnFactors<Waves, N> out{};
    out.lane = lane;
    if (tile.depth == 0) return out;
    const float* const first =
        a + (kind == Gemm::wgrad ? int64_t(tile.group) * rows_a : int64_t(tile.begin)) + tile.row;
#pragma unroll
    for (int i = 0; i < 2 * Waves; ++i) {
      const int32_t at = row + i / 2 * kMmaRows + i % 2 * 8 + int32_t(lane / 4);
      if (at < tile.rows) out.rows[i / 2][i % 2] = __ldg(first + at);
    }
    const float* const factors = b + int64_t(tile.group) * columns + tile.column;
#pragma unroll
    for (int i = 0; i < N / 64; ++i) {
      const int32_t at = i * 64 + int32_t(lane) * 2;
      if (at < columns - tile.column) {
        out.columns[i] = __ldg(reinterpret_cast<const float2*>(factors + at));
      }
    }
    return out;
  }
};

template <Gemm kind>
struct Scales<kind, Fp8Scaling::block> {
  CUtensorMap a;
  CUtensorMap b;         // wgrad alone
  const float* weights;  // else: [E, row blocks, column blocks] of the weight as stored
  int32_t row_blocks;
  int32_t column_blocks;

  template <int Waves, int N>
  __device__ NoScales of(const Tile&, int32_t, int32_t, uint32_t) const {
    return {};
  }
};

// ---- how a partial sum joins the total: `Parts` of 128 columns each ----

using Total128 = float[kScaleBlock / 2];

struct PlainSum {
  static constexpr bool kScales = false;
  static constexpr bool kReadsStage = false;

  __device__ void enter_stage(uint32_t) {}

  template <bool First>
  __device__ void add(Total128& total, const Total128& part, int) const {
    static_assert(!First, "it is the total");
#pragma unroll
    for (int i = 0; i < kScaleBlock / 2; ++i) total[i] += part[i];
  }
};

// The first product is the total.
template <bool First>
__device__ float joined(float total, float part, float scale) {
  return First ? part * scale : fmaf(part, scale, total);
}

// Scales of 1 x 128 blocks of A wait in the stage; scales of weights come from global memory, one
// stage ahead: one value per part and stage, the same for the whole CTA.
template <int Parts>
struct WeightScaledSum {
  static constexpr bool kScales = true;
  static constexpr bool kReadsStage = false;  // after its first MMA

  uint32_t rows;  // shared address of the scale of this thread's first row in stage 0
  int32_t depth_step;           // from a weight scale to that of the next stage
  int32_t stages;               // left to prefetch
  const float* weights[Parts];  // of the next stage
  float upcoming[Parts];        // the same, loaded
  float first[Parts], second[Parts];  // products for the thread's two rows, this stage

  __device__ void prefetch() {
    if (stages == 0) return;
    --stages;
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      upcoming[part] = load_global_early(weights[part]);
      weights[part] += depth_step;
    }
  }

  __device__ void enter_stage(uint32_t offset) {
    const float row = load_shared(rows + offset);
    const float row_8 = load_shared(rows + offset + 8 * sizeof(float));
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      first[part] = row * upcoming[part];
      second[part] = row_8 * upcoming[part];
    }
    prefetch();
  }

  template <bool First>
  __device__ void add(Total128& total, const Total128& part, int index) const {
#pragma unroll
    for (int i = 0; i < kScaleBlock / 2; i += 4) {
      total[i + 0] = joined<First>(total[i + 0], part[i + 0], first[index]);
      total[i + 1] = joined<First>(total[i + 1], part[i + 1], first[index]);
      total[i + 2] = joined<First>(total[i + 2], part[i + 2], second[index]);
      total[i + 3] = joined<First>(total[i + 3], part[i + 3], second[index]);
    }
  }
};

// Both operands have scales of 1 x 128 blocks in the stage: one per row, one per column.
struct RowAndColumnScaledSum {
  static constexpr bool kScales = true;
  static constexpr bool kReadsStage = true;

  uint32_t rows;     // shared addresses in stage 0: of the scale of this thread's first row
  uint32_t columns;  //   and of its first column
  uint32_t offset;   // of the current stage
  float first, second;

  __device__ void enter_stage(uint32_t stage_offset) {
    offset = stage_offset;
    first = load_shared(rows + offset);
    second = load_shared(rows + offset + 8 * sizeof(float));
  }

  template <bool First>
  __device__ void add(Total128& total, const Total128& part, int index) const {
#pragma unroll
    for (int i = 0; i < kScaleBlock / 2; i += 4) {
      const float2 column = load_shared_pair(
          columns + offset + uint32_t(index * kScaleBlock + i * 2) * uint32_t(sizeof(float)));
      total[i + 0] = joined<First>(total[i + 0], part[i + 0], first * column.x);
      total[i + 1] = joined<First>(total[i + 1], part[i + 1], first * column.y);
      total[i + 2] = joined<First>(total[i + 2], part[i + 2], second * column.x);
      total[i + 3] = joined<First>(total[i + 3], part[i + 3], second * column.y);
    }
  }
};

}  // namespace fusegen
