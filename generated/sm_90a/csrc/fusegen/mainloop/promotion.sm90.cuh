// How a partial sum of 128 products joins the total, 128 columns at a time: as it is, or times the
// scales of its blocks.
//
// A promotion belongs to a thread and gives each tile its sum, of `Parts` times 128 columns.
#pragma once


#include <cstdint>

#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/block_scales.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Issued where it stands: the compiler would otherwise delay it until the value is wanted.
__device__ inline float load_global_early(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

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

struct PlainPromotion {
  using Arguments = const void*;
  static constexpr int kStageBytes = 0;

  __device__ PlainPromotion(Arguments, const uint8_t*, uint32_t, uint32_t) {}

  template <int Parts>
  __device__ PlainSum begin(const Tile&) const {
    return {};
  }
};

// The first scaled part is the total.
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
  int32_t k_step;           // from a weight scale to that of the next stage
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
      weights[part] += k_step;
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

// fprop and dgrad, with scales `InStage`.
template <Gemm kind, class InStage>
struct WeightPromotion {
  using Arguments = const BlockScales<kind>*;
  static constexpr int kStageBytes = InStage::kBytes;

  Arguments scales;
  uint32_t rows;  // shared address of the scale of this thread's first row in stage 0

  __device__ WeightPromotion(Arguments scales, const uint8_t* stage_scales, uint32_t row, uint32_t)
      : scales(scales),
        rows(shared_address(stage_scales) + row * uint32_t(sizeof(float))) {}

  template <int Parts>
  __device__ WeightScaledSum<Parts> begin(const Tile& tile) const {
    constexpr bool kForward = kind == Gemm::fprop;
    const int32_t pitch = scales->column_blocks;
    const float* const matrix = scales->weights + int64_t(tile.group) * scales->row_blocks * pitch;
    WeightScaledSum<Parts> sum;
    sum.rows = rows;
    sum.k_step = kForward ? 1 : pitch;
    sum.stages = blocks(tile.k, kScaleBlock);
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      const int64_t block = tile.column / kScaleBlock + part;
      sum.weights[part] = matrix + (kForward ? block * pitch : block);
    }
    sum.prefetch();
    return sum;
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

// wgrad, with scales `InStage`.
template <class InStage>
struct RowAndColumnPromotion {
  using Arguments = const void*;
  static constexpr int kStageBytes = InStage::kBytes;

  uint32_t rows, columns;  // shared addresses in stage 0, as of its sum

  __device__ RowAndColumnPromotion(Arguments, const uint8_t* stage_scales, uint32_t row,
                                   uint32_t lane)
      : rows(shared_address(stage_scales) + row * uint32_t(sizeof(float))),
        columns(shared_address(stage_scales) + InStage::kBytesA +
                lane % 4 * 2 * uint32_t(sizeof(float))) {}

  template <int Parts>
  __device__ RowAndColumnScaledSum begin(const Tile&) const {
    return {rows, columns, 0, 0.f, 0.f};
  }
};

}  // namespace fusegen
