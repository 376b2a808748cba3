// Scales of blocks along the contraction, and where groups of tokens lie in what is padded.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A group's first token in the padded token space of gemm_fp8.h.
__device__ inline int32_t padded_begin(const Tile& tile) {
  return kTokenAlignment * (tile.begin / kTokenAlignment + tile.group);
}

// The row of the scales of a group's first block of tokens.
__device__ inline int32_t first_scale_block(const Tile& tile) {
  return tile.begin / kScaleBlock + tile.group;
}

// What a kernel is told of them.
template <Gemm kind>
struct BlockScales {
  CUtensorMap a;
  CUtensorMap b;         // wgrad alone
  const float* weights;  // else: [E, row blocks, column blocks] of the weight as stored
  int32_t row_blocks;
  int32_t column_blocks;
};

}  // namespace fusegen
