// Codes of 8 bits, as lanes of a warp have them of 16 rows, into a copy whose rows are columns.
//
// 16 rows of a column are 16 bytes there, which begin at a multiple of 16: groups begin at multiples
// of 32 (see QuantizedCopy). Two codes beside each other are an element of an 8x8 matrix, which
// movmatrix turns around among the lanes; what a lane has then meets in half of a store buffer, and each
// lane stores 16 bytes. No tile of codes lies in shared memory: the L2 cache joins the 16 bytes of
// two warps into a sector.
#pragma once

#include <array>
#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Of a part of `Columns` columns: word 2 p + i has those of 16 columns from 16 p on, in the lane's
// first row (i = 0) or its second: two of the first 8 columns, then two of the others.
template <int Columns>
using PartCodes = std::array<uint32_t, Columns / 8>;

struct ColumnwiseCodes {
  uint8_t* data = nullptr;    // nullptr: nobody asks
  float* inverses = nullptr;  // [groups], of the scales
  int64_t pitch = 0;
  int32_t align = 16;         // that groups begin at multiples of: a power of two
  const int64_t* sizes = nullptr;  // [groups] on the device; nullptr: one group
  int32_t groups = 1;
  int32_t tokens = 0;  // of all groups, and of none

  // Rows of a tile that there are codes for: zeros behind a group's last row, up to a multiple.
  __device__ int32_t rows(const Tile& tile) const {
    return data == nullptr ? tile.rows : (tile.rows + align - 1) & -align;
  }

  // Zeros in `columns` from `first` on where no group's rows are. Between the rows of two groups lie
  // at most `align` bytes and as many for each group without any: the last tile of a group has those
  // behind it, of the first group that has rows those before it, too. Where rows are nobody's, their
  // tiles have what is left. One warp of each tile, of `height` rows, calls it.
  __device__ void pad(const Tile& tile, int32_t height, uint32_t lane, int32_t first,
                      int32_t columns) const {
    if (data == nullptr || sizes == nullptr || tile.rows < 1) return;
    const Columns own{first, columns, lane};
    const int32_t end = tile.begin + tile.tokens;
    if (tile.begin == 0 && tile.row == 0) clear(own, 0, place_of_group(0, tile.group));
    const int32_t begin = place_of_group(tile.begin, tile.group);
    if (tile.group >= groups) {
      const int32_t from = begin + tile.row;
      clear(own, from, min(from + height, place_of_group(end, groups)));
    } else if (tile.rows <= height) {
      int32_t next = tile.group + 1;
      while (next < groups && (end >= tokens || __ldg(sizes + next) <= 0)) ++next;
      clear(own, begin + ((tile.tokens + align - 1) & -align), place_of_group(end, next));
    }
  }

  // All lanes; `buffer` has 16 bytes for every column, which nobody else uses meanwhile. Codes of
  // rows past the group's end are taken for zeros, and columns end at `columns`.
  template <int Columns>
  __device__ void store(const PartCodes<Columns>& codes, uint32_t lane, uint32_t buffer,
                        const Tile& tile, Place place, int32_t columns) const {
    stage<Columns>(codes, lane, buffer, tile.tokens - tile.row - place.row);
    __syncwarp();
    const int64_t row = place_of_group(tile.begin, tile.group) + tile.row + place.row;
#pragma unroll
    for (int first = 0; first < Columns; first += 32) {
      const int32_t column = first + int32_t(lane);
      const uint4 rows = staged(buffer, column);
      if (place.column + column >= columns) continue;
      uint8_t* const to = data + (place.column + column) * pitch + row;
      *reinterpret_cast<uint4*>(to) = rows;
    }
  }

 private:
  struct Columns {
    int32_t first, count;
    uint32_t lane;
  };

  // Where a group begins along the rows of the copy.
  __device__ int32_t place_of_group(int32_t begin, int32_t group) const {
    return (begin & -align) + align * group;
  }

  __device__ void clear(const Columns& of, int32_t from, int32_t to) const {
    for (int32_t column = int32_t(of.lane); column < of.count; column += 32) {
      uint8_t* const row = data + (of.first + column) * pitch;
      for (int32_t at = from; at < to; at += 16) *reinterpret_cast<uint4*>(row + at) = uint4{};
    }
  }

  // The 16 bytes of a column, whose place in the buffer keeps the lanes of `stage` in banks of their
  // own: words of rows 2 t and 2 t + 1 of the first 8 rows, and of the others.
  __device__ static uint32_t place_of(uint32_t buffer, int32_t column) {
    return buffer + uint32_t(column ^ (column >> 3 & 1)) * 16;
  }

  template <int Columns>
  __device__ static void stage(const PartCodes<Columns>& codes, uint32_t lane, uint32_t buffer,
                               int32_t rows) {
    const int32_t row = int32_t(lane / 4);
#pragma unroll
    for (int p = 0; p < Columns / 16; ++p) {
      const uint32_t first = transposed(row < rows ? codes[2 * p] : 0);
      const uint32_t second = transposed(row + 8 < rows ? codes[2 * p + 1] : 0);
      const int32_t element = int32_t(lane / 4);
      const int32_t column = p * 16 + element % 2 * 8 + element / 2 * 2;
      const uint32_t own = lane % 4 * 4;
      store_word(place_of(buffer, column) + own, __byte_perm(first, second, 0x6420));
      store_word(place_of(buffer, column + 1) + own, __byte_perm(first, second, 0x7531));
    }
  }

  __device__ static uint4 staged(uint32_t buffer, int32_t column) {
    uint4 in;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(in.x), "=r"(in.y), "=r"(in.z), "=r"(in.w)
                 : "r"(place_of(buffer, column))
                 : "memory");
    return {__byte_perm(in.x, in.y, 0x5410), __byte_perm(in.z, in.w, 0x5410),
            __byte_perm(in.x, in.y, 0x7632), __byte_perm(in.z, in.w, 0x7632)};
  }

  // Row lane / 4 of an 8x8 matrix of 16 bits for its column.
  __device__ static uint32_t transposed(uint32_t row) {
    uint32_t column;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
  }

  __device__ static void store_word(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
  }
};

}  // namespace fusegen
