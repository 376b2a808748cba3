// An output tile of a grouped or dense GEMM, as a tile source hands it out.
//
// A tile source has `Tile next()`, called by all lanes of one warp, which all get the same tile:
// RowWalk where rows are tokens, KWalk where the contraction runs over tokens.
#pragma once

#include <cstdint>

namespace fusegen {

enum class Share : int32_t { none, a, b };

struct alignas(16) Tile {
  int32_t group;   // negative: no more tiles
  int32_t row;     // first row, counted from the group's first row (wgrad: of N)
  int32_t rows;    // rows that exist; below 1 the CTA only helps its neighbour
  int32_t column;  // first column
  int32_t begin;   // the group's first token
  int32_t tokens;  // the group's token count
  int32_t k;       // contraction length; 0 gives zeros
  Share share;
};

struct Shape {
  const int64_t* group_sizes;  // [groups] on the device; nullptr: one group of all tokens
  int32_t tokens;
  int32_t groups;
  int32_t n;
  int32_t k;
  int32_t owners;  // of rows: the groups, and one more where rows that none has come out zero
};

__host__ __device__ constexpr uint32_t blocks(uint32_t extent, uint32_t size) {
  return (extent + size - 1) / size;
}

// Boxes of `width` that have a part of an extent, of `most`.
__host__ __device__ constexpr int boxes_in(int32_t extent, int32_t width, int most) {
  const int found = extent <= 0 ? 0 : int(blocks(extent, width));
  return found < most ? found : most;
}

}  // namespace fusegen
