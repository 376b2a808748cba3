// Where a group's tokens begin in the spaces of gemm/gemm_fp8.h.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A group's first token in the padded token space.
__device__ inline int32_t padded_begin(const Tile& tile) {
  return kTokenAlignment * (tile.begin / kTokenAlignment + tile.group);
}

// The row of the scales of a group's first block of tokens.
__device__ inline int32_t first_scale_block(const Tile& tile) {
  return tile.begin / kScaleBlock + tile.group;
}

}  // namespace fusegen
