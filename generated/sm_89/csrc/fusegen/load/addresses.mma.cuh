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

// Operands of a gated fprop: the tile's columns of the first half of the weight's rows.
struct GatedAddresses : PlainAddresses<Gemm::fprop> {
  __device__ static const uint8_t* b(const MmaOperands& in, const Tile& tile, const Shape& shape) {
    const int64_t matrix = int64_t(tile.group) * shape.n;
    return in.b + (matrix + tile.column / 2) * in.pitch_b;
  }
};

// Which line of an operand each line of its tile is, counted from the tile's first: the same.
struct EveryLine {
  static constexpr int kHalves = 1;
  __host__ __device__ static constexpr int line(int of_tile) { return of_tile; }
  __host__ __device__ static constexpr bool is_second(int) { return false; }
  // Whether lines that many apart are the sum of where they begin and of what they are apart.
  static constexpr bool adds(int) { return true; }
};

// Of two halves of an operand, so that each warp has as many columns of the first half as of the
// second one behind them, and the same ones.
template <int WarpColumns>
struct HalvesOfWarps {
  static constexpr int kHalves = 2;
  __host__ __device__ static constexpr int line(int of_tile) {
    return of_tile / WarpColumns * (WarpColumns / 2) + of_tile % (WarpColumns / 2);
  }
  __host__ __device__ static constexpr bool is_second(int of_tile) {
    return of_tile % WarpColumns >= WarpColumns / 2;
  }
  static constexpr bool adds(int step) {
    return step % WarpColumns == 0 || WarpColumns / 2 % step == 0;
  }
};

}  // namespace fusegen
