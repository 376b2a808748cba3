// Where the boxes of operands lie in global memory.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/padded_tokens.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Operands as modules have them. GEMMs along tokens clip at the group's end, where the next
// group's tokens follow.
template <Gemm kind>
struct PlainCoordinates {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  static constexpr int kRankA = kAlongTokens ? 4 : 2;
  static constexpr int kRankB = kAlongTokens ? 4 : 3;

  __device__ static BoxCoordinates a(const Tile& tile, int32_t row, int32_t k) {
    if constexpr (kAlongTokens) return ragged_coordinates(row, tile.begin, tile.tokens, k);
    return {k, tile.begin + row, 0, 0};
  }

  __device__ static BoxCoordinates b(const Tile& tile, int32_t column, int32_t k) {
    if constexpr (kAlongTokens) return ragged_coordinates(column, tile.begin, tile.tokens, k);
    if constexpr (kind == Gemm::dgrad) return {column, k, tile.group, 0};
    return {k, column, tile.group, 0};
  }
};

// Operands of a gated fprop: box h of B has the tile's columns in half h of the weight's rows,
// [groups, 2, n / 2, k], where it is clipped as a matrix by itself.
template <int BoxWidthB>
struct GatedCoordinates : PlainCoordinates<Gemm::fprop> {
  static constexpr int kRankB = 4;

  __device__ static BoxCoordinates b(const Tile& tile, int32_t column, int32_t k) {
    return {k, tile.column / 2, (column - tile.column) / BoxWidthB, tile.group};
  }
};

// Codes, whose contraction is contiguous: along tokens those of transposed copies.
template <Gemm kind>
struct CodeCoordinates {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  static constexpr int kRankA = 2;
  static constexpr int kRankB = kAlongTokens ? 2 : 3;

  __device__ static BoxCoordinates a(const Tile& tile, int32_t row, int32_t k) {
    if constexpr (kAlongTokens) return {padded_begin(tile) + k, row, 0, 0};
    return {k, tile.begin + row, 0, 0};
  }

  __device__ static BoxCoordinates b(const Tile& tile, int32_t column, int32_t k) {
    if constexpr (kAlongTokens) return {padded_begin(tile) + k, column, 0, 0};
    return {k, column, tile.group, 0};
  }
};

}  // namespace fusegen
