// Where the tiles of operands begin in global memory.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Operands of all groups.
struct MmaOperands {
  const uint8_t* a;
  const uint8_t* b;
  uint32_t pitch_a, pitch_b;  // bytes of a row
};

// Operands of 16 bits, as modules have them.
template <Gemm kind>
struct PlainAddresses {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  static constexpr bool kWholeChunks = true;  // of rows, whatever of them exists
  static constexpr int64_t kBytes = 2;  // of an element

  __device__ static const uint8_t* a(const MmaOperands& in, const Tile& tile, const Shape&) {
    const int64_t token = tile.begin;
    if constexpr (kAlongTokens) return in.a + token * in.pitch_a + tile.row * kBytes;
    return in.a + (token + tile.row) * in.pitch_a;
  }

  __device__ static const uint8_t* b(const MmaOperands& in, const Tile& tile, const Shape& shape) {
    const int64_t matrix = int64_t(tile.group) * shape.n;  // first row of the group's weight
    if constexpr (kind == Gemm::fprop) return in.b + (matrix + tile.column) * in.pitch_b;
    const int64_t row = kAlongTokens ? int64_t(tile.begin) : matrix;
    return in.b + row * in.pitch_b + tile.column * kBytes;
  }
};

}  // namespace fusegen
