// What scales of groups leave for the end of a GEMM of decoded operands: amax_a amax_b of its
// group / (448 6)^2, in fp32. See the numerics of NVFP4.
#pragma once

#include <cstdint>

#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/scales.cuh"

namespace fusegen {

struct GroupAmaxes {
  const float* a;  // [groups]; nullptr: nothing is left for the end
  const float* b;

  template <class Values>
  __device__ TileFactor begin(const Tile& tile, Place, int32_t, uint32_t) const {
    constexpr float kRange = 448.0f * 6.0f;
    if (a == nullptr) return {1.0f};
    if (tile.k == 0) return {0.0f};
    return {__ldg(a + tile.group) * __ldg(b + tile.group) / (kRange * kRange)};
  }
};

}  // namespace fusegen
