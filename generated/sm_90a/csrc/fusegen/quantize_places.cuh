// Where tiles of 128 rows lie: in the input, and in copies whose groups start at multiples.
//
// Tiles are numbered group after group; every group has at least one, which writes its padding. A
// pseudo-group after the last one owns the rows past all groups, and the padding there. One warp
// finds a tile: a lane owns a few consecutive groups at a time, and a scan over the lanes gives
// each its first row and its first tile. Compiles for the host too.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define FUSEGEN_INLINE __host__ __device__ __forceinline__
#else
#define FUSEGEN_INLINE inline
#endif
#ifdef __CUDA_ARCH__
#define FUSEGEN_UNROLL _Pragma("unroll")
#else
#define FUSEGEN_UNROLL
#endif

namespace fusegen {

inline constexpr int kTileRows = 128;

struct RowGroups {
  const int64_t* split_sizes;  // nullptr: matrices of equal length
  int32_t rows;                // in all where ragged, else of one matrix
  int32_t groups;

  FUSEGEN_INLINE bool ragged() const { return split_sizes != nullptr; }
};

struct RowTile {
  int32_t group;   // `groups`: rows past all groups; negative: no tile
  int32_t begin;   // first row of the group in the input; of a matrix 0
  int32_t length;  // rows of the group
  int32_t row;     // first row of the tile, counted in the group
  int32_t index;   // number of the tile

  FUSEGEN_INLINE int32_t rows() const {
    const int32_t left = length - row;
    return left < kTileRows ? left : kTileRows;
  }
  FUSEGEN_INLINE bool last() const { return row + kTileRows >= length; }
};

FUSEGEN_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

// The sum of two counts of at most 2^30 + 1 rows, but not more than `most`.
FUSEGEN_INLINE int32_t sum_to(int32_t a, int32_t b, int32_t most) {
  const uint32_t sum = uint32_t(a) + uint32_t(b);
  return sum < uint32_t(most) ? int32_t(sum) : most;
}

// Every group has a tile.
FUSEGEN_INLINE int32_t tiles_of(int32_t length) {
  const uint32_t tiles = (uint32_t(length) + kTileRows - 1) / kTileRows;
  return tiles == 0 ? 1 : int32_t(tiles);
}

// Of groups that follow one another.
struct Extent {
  int32_t rows, tiles;
};

// Consecutive groups of one lane. Their sizes are read together, before one is used: blocks of
// threads wait for them.
struct LaneGroups {
  static constexpr int kMost = 4;
  int32_t first, count;
  int32_t rows[kMost];

  // Ends after `limit` + 1 rows: more than `limit` are too many, and the sum never overflows.
  FUSEGEN_INLINE Extent extent(int32_t limit) const {
    Extent extent{0, 0};
FUSEGEN_UNROLL
    for (int i = 0; i < kMost; ++i) {
      extent.rows = sum_to(extent.rows, rows[i], limit + 1);
      extent.tiles += i < count ? tiles_of(rows[i]) : 0;
    }
    return extent;
  }

  // Leaves `limit` rows at most.
  FUSEGEN_INLINE void clip(int32_t limit) {
FUSEGEN_UNROLL
    for (int i = 0; i < kMost; ++i) {
      rows[i] = least(rows[i], limit);
      limit -= rows[i];
    }
  }

  // What lies before group `first` + `index`.
  FUSEGEN_INLINE Extent before(int32_t index) const {
    Extent extent{0, 0};
FUSEGEN_UNROLL
    for (int i = 0; i < kMost; ++i) {
      if (i >= index) continue;
      extent.rows += rows[i];
      extent.tiles += tiles_of(rows[i]);
    }
    return extent;
  }
};

inline constexpr int32_t kChunk = 32 * LaneGroups::kMost;  // groups that a warp holds at once

// A group may want any number of rows; it gets 0 to all of them.
FUSEGEN_INLINE LaneGroups lane_groups(const RowGroups& groups, int32_t chunk, int lane) {
  LaneGroups own;
  own.first = chunk + lane * LaneGroups::kMost;
  own.count = groups.groups - own.first;
  int64_t sizes[LaneGroups::kMost];
FUSEGEN_UNROLL
  for (int i = 0; i < LaneGroups::kMost; ++i) {
    sizes[i] = i < own.count ? groups.split_sizes[own.first + i] : 0;
  }
FUSEGEN_UNROLL
  for (int i = 0; i < LaneGroups::kMost; ++i) {
    own.rows[i] = sizes[i] < 0 ? 0 : sizes[i] < groups.rows ? int32_t(sizes[i]) : groups.rows;
  }
  return own;
}

// Tile `index` of the lane's groups, which follow `before`; it must be one of theirs.
FUSEGEN_INLINE RowTile lane_tile(const LaneGroups& own, Extent before, int32_t index) {
  RowTile tile{};
FUSEGEN_UNROLL
  for (int i = 0; i < LaneGroups::kMost; ++i) {
    if (i < own.count && index >= before.tiles) {
      const int32_t row = (index - before.tiles) * kTileRows;
      tile = {own.first + i, before.rows, own.rows[i], row, index};
    }
    before.rows += own.rows[i];
    before.tiles += tiles_of(own.rows[i]);
  }
  return tile;
}

// Tile `index` past all groups, if there is one.
FUSEGEN_INLINE RowTile past_tile(const RowGroups& groups, Extent before, int32_t index) {
  const int32_t row = (index - before.tiles) * kTileRows;
  const int32_t length = groups.rows - before.rows;
  return {row < length ? groups.groups : -1, before.rows, length, row, index};
}

// At least one, which writes what a matrix without rows has: its scales.
FUSEGEN_INLINE int32_t tiles_of_matrix(const RowGroups& groups) {
  return tiles_of(groups.rows);
}

FUSEGEN_INLINE RowTile matrix_tile(const RowGroups& groups, int32_t index) {
  const int32_t tiles = tiles_of_matrix(groups);
  const int32_t group = int32_t(uint32_t(index) / uint32_t(tiles));
  return {group, 0, groups.rows, (index - group * tiles) * kTileRows, index};
}

// First row of the tile in the input and in rowwise copies.
FUSEGEN_INLINE int64_t input_row(const RowGroups& groups, const RowTile& tile) {
  const int64_t matrix = groups.ragged() ? 0 : int64_t(tile.group) * groups.rows;
  return matrix + tile.begin + tile.row;
}

// A space in which every group starts at a multiple of `align` rows, a power of two, so that no
// thread divides. `extent` is the length of a matrix there; ragged spaces have
// align * (rows / align + groups).
struct Space {
  int32_t align;
  int32_t extent;

  FUSEGEN_INLINE int32_t floor(int32_t row) const { return row & -align; }
};

FUSEGEN_INLINE int32_t ragged_extent(const RowGroups& groups, Space space) {
  return space.floor(groups.rows) + space.align * groups.groups;
}

// The first place of a group whose first row is `begin`.
FUSEGEN_INLINE int32_t start_of(int32_t begin, int32_t group, Space space) {
  return space.floor(begin) + space.align * group;
}

// The tile's first place, counted from the first of all groups, or from its matrix's first.
FUSEGEN_INLINE int32_t place_of(const RowGroups& groups, const RowTile& tile, Space space) {
  return groups.ragged() ? start_of(tile.begin, tile.group, space) + tile.row : tile.row;
}

// Places that the tile owns, its own padding included: every place has one owner. Can be above
// 128 for a last tile, and below 1 past all groups.
FUSEGEN_INLINE int32_t owned_places(const RowGroups& groups, const RowTile& tile, Space space) {
  int32_t end = space.extent;
  if (groups.ragged()) {
    const int32_t next = tile.group == groups.groups
                             ? ragged_extent(groups, space)
                             : start_of(tile.begin + tile.length, tile.group + 1, space);
    end = next - start_of(tile.begin, tile.group, space);
  }
  const int32_t left = end - tile.row;
  return tile.last() || left < kTileRows ? left : kTileRows;
}

// The block that holds the tile's first row, where every group starts a block of so many rows.
template <int kBlock>
FUSEGEN_INLINE int64_t block_of(const RowGroups& groups, const RowTile& tile) {
  static_assert(kTileRows % kBlock == 0);
  constexpr uint32_t block = kBlock;
  if (groups.ragged()) return int64_t(tile.begin / block + tile.row / block) + tile.group;
  return int64_t(tile.group) * ((groups.rows + block - 1) / block) + tile.row / block;
}

}  // namespace fusegen

#undef FUSEGEN_INLINE
#undef FUSEGEN_UNROLL
