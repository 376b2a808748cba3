// Where tiles of 128 rows lie: in the input, and in copies whose groups start at multiples.
//
// Tiles are numbered group after group; every group has at least one, which writes its padding. A
// pseudo-group after the last one owns the rows past all groups, and the padding there. One warp
// finds a tile: each lane owns a run of consecutive groups, and two scans over the lanes give each
// its first row and its first tile. Compiles for the host too.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define FUSEGEN_INLINE __host__ __device__ __forceinline__
#else
#define FUSEGEN_INLINE inline
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

// Rows a lane's groups may have; sums stop at all rows, at most 2^30, so that they never overflow.
struct LaneGroups {
  int32_t first, end;
};

FUSEGEN_INLINE LaneGroups lane_groups(const RowGroups& groups, int lane) {
  const int32_t owners = groups.groups + 1;
  const int32_t each = (owners + 31) / 32;
  return {least(lane * each, owners), least((lane + 1) * each, owners)};
}

FUSEGEN_INLINE int32_t wanted_rows(const RowGroups& groups, int32_t group) {
  if (group == groups.groups) return groups.rows;
  const int64_t size = groups.split_sizes[group];
  return size < 0 ? 0 : size < groups.rows ? int32_t(size) : groups.rows;
}

FUSEGEN_INLINE int32_t end_of(const RowGroups& groups, int32_t begin, int32_t group) {
  return least(begin + wanted_rows(groups, group), groups.rows);
}

FUSEGEN_INLINE int32_t tiles_of(const RowGroups& groups, int32_t length, int32_t group) {
  const int32_t tiles = (length + kTileRows - 1) / kTileRows;
  return tiles == 0 && group < groups.groups ? 1 : tiles;
}

FUSEGEN_INLINE int32_t lane_rows(const RowGroups& groups, LaneGroups own) {
  int32_t rows = 0;
  for (int32_t g = own.first; g < own.end; ++g) rows = end_of(groups, rows, g);
  return rows;
}

FUSEGEN_INLINE int32_t lane_tiles(const RowGroups& groups, LaneGroups own, int32_t begin) {
  int32_t tiles = 0;
  for (int32_t g = own.first; g < own.end; ++g) {
    const int32_t end = end_of(groups, begin, g);
    tiles += tiles_of(groups, end - begin, g);
    begin = end;
  }
  return tiles;
}

// Tile `index`, which belongs to one of the lane's groups; `first` is the lane's first tile.
FUSEGEN_INLINE RowTile lane_tile(const RowGroups& groups, LaneGroups own, int32_t begin,
                                 int32_t first, int32_t index) {
  for (int32_t g = own.first; g < own.end; ++g) {
    const int32_t end = end_of(groups, begin, g);
    const int32_t tiles = tiles_of(groups, end - begin, g);
    if (index < first + tiles) {
      return {g, begin, end - begin, (index - first) * kTileRows, index};
    }
    first += tiles;
    begin = end;
  }
  return {-1, 0, 0, 0, index};
}

// At least one, which writes what a matrix without rows has: its scales.
FUSEGEN_INLINE int32_t tiles_of_matrix(const RowGroups& groups) {
  return groups.rows == 0 ? 1 : (groups.rows + kTileRows - 1) / kTileRows;
}

FUSEGEN_INLINE RowTile matrix_tile(const RowGroups& groups, int32_t index) {
  const int32_t tiles = tiles_of_matrix(groups);
  const int32_t group = index / tiles;
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
