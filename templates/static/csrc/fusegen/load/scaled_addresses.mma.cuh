// Where the tiles of operands begin in global memory whose scales lie in atoms: see
// gemm/gemm_scaled.h.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Codes of `bits`, whose contraction is contiguous: along tokens those of transposed copies.
template <Gemm kind, int bits>
struct ScaledAddresses {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  // A transform leaves codes in the whole of a group's last block, and zeros follow everywhere else.
  static constexpr bool kWholeChunks = kAlongTokens;

  __device__ static const uint8_t* a(const MmaOperands& in, const Tile& tile, const Shape&) {
    const int64_t row = tile.row;
    if constexpr (kAlongTokens) return in.a + row * in.pitch_a + first_of_group(tile);
    return in.a + (tile.begin + row) * in.pitch_a;
  }

  __device__ static const uint8_t* b(const MmaOperands& in, const Tile& tile, const Shape& shape) {
    const int64_t row = tile.column;
    if constexpr (kAlongTokens) return in.b + row * in.pitch_b + first_of_group(tile);
    const int64_t rows = kind == Gemm::fprop ? shape.n : shape.k;  // of a group's weight
    return in.b + (tile.group * rows + row) * in.pitch_b;
  }

 private:
  __device__ static int64_t first_of_group(const Tile& tile) {
    return int64_t(tile.begin / kAtomRows + tile.group) * (kAtomRows * bits / 8);
  }
};

}  // namespace fusegen
