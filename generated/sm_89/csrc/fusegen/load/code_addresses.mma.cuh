// Where the tiles of FP8 operands begin in global memory: see gemm/gemm_fp8.h.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/load/padded_tokens.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Codes of 8 bits, whose contraction is contiguous: along tokens those of transposed copies.
template <Gemm kind>
struct CodeAddresses {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  static constexpr bool kWholeChunks = false;

  __device__ static const uint8_t* a(const MmaOperands& in, const Tile& tile, const Shape&) {
    const int64_t row = tile.row;
    if constexpr (kAlongTokens) return in.a + row * in.pitch_a + padded_begin(tile);
    return in.a + (tile.begin + row) * in.pitch_a;
  }

  __device__ static const uint8_t* b(const MmaOperands& in, const Tile& tile, const Shape& shape) {
    const int64_t row = tile.column;
    if constexpr (kAlongTokens) return in.b + row * in.pitch_b + padded_begin(tile);
    const int64_t rows = kind == Gemm::fprop ? shape.n : shape.k;  // of a group's weight
    return in.b + (tile.group * rows + row) * in.pitch_b;
  }
};

}  // namespace fusegen
