// In which order the tiles of one group are computed, and which two a cluster computes together.
//
// A cluster of two computes two tiles that share an operand, which each CTA loads half of and
// multicasts: two row blocks of one column block (B shared), or, for the odd last row block of a
// group, two column blocks of it (A shared). Only where both counts are odd one CTA has no tile
// of its own; it still loads its half for the other.
#pragma once

#include <cstdint>

#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Row blocks per super-row, about: of 8 and 16, the one whose wave of tiles reads fewer bytes.
template <int TileM, int TileN>
constexpr uint32_t super_row() {
  constexpr uint32_t kWave = 132;
  constexpr uint32_t narrow = 8 * TileM + blocks(kWave, 8) * TileN;
  constexpr uint32_t wide = 16 * TileM + blocks(kWave, 16) * TileN;
  return narrow < wide ? 8 : 16;
}

// Super-rows of one group have equal, even heights: a short last one would read every column
// block again for a few row blocks.
template <int SuperRow>
__device__ uint32_t super_row_height(uint32_t row_blocks) {
  const uint32_t count = max(1u, (row_blocks + SuperRow / 2) / SuperRow);
  return (blocks(row_blocks, count) + 1) / 2 * 2;
}

// Cluster steps of so many row blocks. Additive over super-rows because those are even.
template <int Cluster>
__host__ __device__ constexpr uint32_t group_steps(uint32_t row_blocks, uint32_t column_blocks) {
  if constexpr (Cluster == 1) return row_blocks * column_blocks;
  return (column_blocks / 2) * row_blocks + (column_blocks % 2) * ((row_blocks + 1) / 2);
}

struct Block {
  uint32_t row, column;
  Share share;
};

// Step -> row and column block: super-rows outermost, then columns, then rows of the super-row.
template <int Cluster, int SuperRow>
__device__ Block raster(uint32_t step, uint32_t row_blocks, uint32_t column_blocks,
                        uint32_t rank) {
  const uint32_t full_height = super_row_height<SuperRow>(row_blocks);
  const uint32_t per_super_row = group_steps<Cluster>(full_height, column_blocks);
  const uint32_t first = step / per_super_row * full_height;
  const uint32_t local = step % per_super_row;
  const uint32_t height = min(full_height, row_blocks - first);
  if constexpr (Cluster == 1) {
    return {first + local % height, local / height, Share::none};
  }
  const uint32_t column_pair = local / height;
  const uint32_t position = local % height;
  if (column_pair >= column_blocks / 2) {
    const uint32_t pair = local - (column_blocks / 2) * height;
    return {first + 2 * pair + rank, column_blocks - 1, Share::b};
  }
  const uint32_t pairs = height / 2;
  if (position == 2 * pairs) return {first + position, 2 * column_pair + rank, Share::a};
  const uint32_t right = position >= pairs;
  return {first + 2 * (position - right * pairs) + rank, 2 * column_pair + right, Share::b};
}

}  // namespace fusegen
