// Scales of blocks along the contraction, which come with the stage whose partial sums they
// multiply.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/padded_tokens.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// What a kernel is told of them.
template <Gemm kind>
struct BlockScales {
  CUtensorMap a;
  CUtensorMap b;         // wgrad alone
  const float* weights;  // else: [E, row blocks, column blocks] of the weight as stored
  int32_t row_blocks;
  int32_t column_blocks;
};

// Those of one stage: of the tile's rows, and in wgrad of its columns.
template <Gemm kind, Fp8Scaling scaling, class Config>
struct StageScales {
  static constexpr bool kRows = scaling == Fp8Scaling::block;
  static constexpr bool kColumns = kRows && kind == Gemm::wgrad;
  static constexpr int kBytesA = kRows ? Config::tile_m * int(sizeof(float)) : 0;
  static constexpr int kBytesB = kColumns ? Config::tile_n * int(sizeof(float)) : 0;
  static constexpr int kBytes = kBytesA + kBytesB;
  static_assert(kBytesA % 128 == 0 && kBytesB % 128 == 0, "TMA writes at multiples of 128 bytes");
};

// Loads those of a stage, for this CTA alone.
template <Gemm kind, class InStage>
struct BlockScaleLoader {
  static constexpr int kBytes = InStage::kBytes;

  const BlockScales<kind>* scales;

  __device__ explicit BlockScaleLoader(const BlockScales<kind>* scales) : scales(scales) {}

  __device__ void prefetch() const {
    prefetch_descriptor(&scales->a);
    if constexpr (InStage::kColumns) prefetch_descriptor(&scales->b);
  }

  __device__ void load(CopyBarrier& full, uint8_t* to, const Tile& tile, int32_t k) const {
    const int32_t block = k / kScaleBlock;
    if constexpr (InStage::kColumns) {
      const int32_t at = first_scale_block(tile) + block;
      load_box<2>(&scales->a, full, to, {tile.row, at, 0, 0});
      load_box<2>(&scales->b, full, to + InStage::kBytesA, {tile.column, at, 0, 0});
    } else {
      load_box<2>(&scales->a, full, to, {padded_begin(tile) + tile.row, block, 0, 0});
    }
  }
};

}  // namespace fusegen
