// Where rows lie: in the input, in copies whose groups start at multiples, and in tiles.
//
// A tile is 128 consecutive places of a space in which groups start at multiples, whatever groups
// those belong to; a slice is 16 of them, all of one group. So a tile's warps have rows to work on
// wherever groups are short, and its places in a copy that is laid out alike are whole lines. A
// pseudo-group after the last one owns the rows past all groups, and the padding there. One warp
// finds a tile's slices: a lane owns a few consecutive groups at a time, and a scan over the lanes
// gives each its first row. Compiles for the host too.
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
inline constexpr int kSliceRows = 16;
inline constexpr int kSlices = kTileRows / kSliceRows;

struct RowGroups {
  const int64_t* group_sizes;  // nullptr: matrices of equal length
  int32_t rows;                // in all where ragged, else of one matrix
  int32_t groups;

  FUSEGEN_INLINE bool ragged() const { return group_sizes != nullptr; }
};

FUSEGEN_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
FUSEGEN_INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

// The sum of two counts of rows, but not more than `limit`.
FUSEGEN_INLINE int32_t sum_to(int32_t a, int32_t b, int32_t limit) {
  const uint32_t sum = uint32_t(a) + uint32_t(b);
  return sum < uint32_t(limit) ? int32_t(sum) : limit;
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

// 16 neighbouring places of one group.
struct alignas(16) Slice {
  int32_t group;   // `groups`: rows past all groups
  int32_t begin;   // first row of the group in the input; of a matrix 0
  int32_t length;  // rows of the group
  int32_t row;     // the slice's first, counted in the group; padding begins at `length`

  FUSEGEN_INLINE int32_t rows(int32_t limit = kSliceRows) const {
    return most(0, least(length - row, limit));
  }
};

// First row of the slice in the input and in rowwise copies.
FUSEGEN_INLINE int64_t input_row(const RowGroups& groups, const Slice& slice) {
  const int64_t matrix = groups.ragged() ? 0 : int64_t(slice.group) * groups.rows;
  return matrix + slice.begin + slice.row;
}

// The slice's first place, counted from the first of all groups, or from its matrix's first.
FUSEGEN_INLINE int32_t place_of(const RowGroups& groups, const Slice& slice, Space space) {
  return groups.ragged() ? start_of(slice.begin, slice.group, space) + slice.row : slice.row;
}

// Places that the slice's group owns from the slice's first on, padding included; 0 and less past
// them. Every place of a space has one owner, and in a space of larger alignment a group never owns
// fewer.
FUSEGEN_INLINE int32_t owned_places(const RowGroups& groups, const Slice& slice, Space space) {
  int32_t end = space.extent;
  if (groups.ragged()) {
    const int32_t next = slice.group == groups.groups
                             ? ragged_extent(groups, space)
                             : start_of(slice.begin + slice.length, slice.group + 1, space);
    end = next - start_of(slice.begin, slice.group, space);
  }
  return end - slice.row;
}

// Whether the slice's group owns its first place. Every space has places for the rows of groups: where there
// are rows the sums above are spared.
FUSEGEN_INLINE bool owns_place(const RowGroups& groups, const Slice& slice, Space space) {
  const bool holds_rows = slice.group < groups.groups && slice.row < slice.length;
  return holds_rows || owned_places(groups, slice, space) > 0;
}

// The block that holds the slice's first row, where every group starts a block of so many rows.
template <int kBlock>
FUSEGEN_INLINE int64_t block_of(const RowGroups& groups, const Slice& slice) {
  static_assert(kTileRows % kBlock == 0);
  constexpr uint32_t block = kBlock;
  if (groups.ragged()) return int64_t(slice.begin / block + slice.row / block) + slice.group;
  return int64_t(slice.group) * ((groups.rows + block - 1) / block) + slice.row / block;
}

// ---- tiles

// At least one, which writes what a matrix without rows has: its scales.
FUSEGEN_INLINE int32_t tiles_of(int32_t places) {
  return most(1, int32_t((uint32_t(places) + kTileRows - 1) / kTileRows));
}

// Tiles of all groups; where ragged the pseudo-group has a start of its own.
FUSEGEN_INLINE int32_t row_tiles(const RowGroups& groups, Space space) {
  return groups.ragged() ? tiles_of(ragged_extent(groups, space) + space.align)
                         : groups.groups * tiles_of(space.extent);
}

FUSEGEN_INLINE Slice matrix_slice(const RowGroups& groups, Space space, int32_t tile, int slice) {
  const int32_t tiles = tiles_of(space.extent);
  const int32_t group = int32_t(uint32_t(tile) / uint32_t(tiles));
  return {group, 0, groups.rows, (tile - group * tiles) * kTileRows + slice * kSliceRows};
}

struct TileRange {
  int32_t first, end;
};

// The tiles that hold rows of a slice's group.
FUSEGEN_INLINE TileRange tiles_with_rows(const RowGroups& groups, const Slice& slice, Space space) {
  const int32_t start = groups.ragged() ? start_of(slice.begin, slice.group, space)
                                        : slice.group * tiles_of(space.extent) * kTileRows;
  const int32_t first = start / kTileRows;
  return {first, slice.length == 0 ? first : (start + slice.length - 1) / kTileRows + 1};
}

// ---- groups of a lane

// Consecutive groups of one lane. Their sizes are read together, before one is used: blocks of
// threads wait for them.
struct LaneGroups {
  static constexpr int kMost = 4;
  int32_t first, count;
  int32_t rows[kMost];

  FUSEGEN_INLINE int32_t all(int32_t limit) const {
    int32_t sum = 0;
FUSEGEN_UNROLL
    for (int i = 0; i < kMost; ++i) sum = sum_to(sum, rows[i], limit);
    return sum;
  }

  // Calls `visit(group, begin, end)` with the rows of each; the first begins at `begin`.
  template <class Visit>
  FUSEGEN_INLINE void each(int32_t begin, int32_t limit, Visit visit) const {
FUSEGEN_UNROLL
    for (int i = 0; i < kMost; ++i) {
      const int32_t end = sum_to(begin, rows[i], limit);
      if (i < count) visit(first + i, begin, end);
      begin = end;
    }
  }
};

inline constexpr int32_t kChunk = 32 * LaneGroups::kMost;  // groups that a warp holds at once

// A group may want any number of rows; it gets 0 to those that are left.
FUSEGEN_INLINE LaneGroups lane_groups(const RowGroups& groups, int32_t chunk, int lane) {
  LaneGroups own;
  own.first = chunk + lane * LaneGroups::kMost;
  own.count = groups.groups - own.first;
  int64_t sizes[LaneGroups::kMost];
FUSEGEN_UNROLL
  for (int i = 0; i < LaneGroups::kMost; ++i) {
    sizes[i] = i < own.count ? groups.group_sizes[own.first + i] : 0;
  }
FUSEGEN_UNROLL
  for (int i = 0; i < LaneGroups::kMost; ++i) {
    own.rows[i] = sizes[i] < 0 ? 0 : sizes[i] < groups.rows ? int32_t(sizes[i]) : groups.rows;
  }
  return own;
}

// Writes those slices of a tile that are the group's: rows [begin, end), places from its start to
// the next group's.
FUSEGEN_INLINE void mark_slices(const RowGroups& groups, Space space, int32_t first_place,
                                int32_t group, int32_t begin, int32_t end, Slice* slices) {
  const int32_t start = start_of(begin, group, space);
  const int32_t next = start_of(end, group + 1, space), last = first_place + kTileRows;
  const int32_t until = group == groups.groups ? last : least(next, last);
  for (int32_t place = most(start, first_place); place < until; place += kSliceRows) {
    slices[(place - first_place) / kSliceRows] = {group, begin, end - begin, place - start};
  }
}

}  // namespace fusegen

#undef FUSEGEN_INLINE
#undef FUSEGEN_UNROLL
