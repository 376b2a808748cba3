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
  int32_t align = 32;         // that groups begin at multiples of: a power of two

  // Rows of a tile that there are codes for: zeros behind a group's last row, as far as a product
  // reads them.
  __device__ int32_t rows(const Tile& tile) const {
    return data == nullptr ? tile.rows : (tile.rows + align - 1) & -align;
  }

  // All lanes; `buffer` has 16 bytes for every column, which nobody else uses meanwhile. Codes of
  // rows past the group's end are taken for zeros, and columns end at `columns`.
  template <int Columns>
  __device__ void store(const PartCodes<Columns>& codes, uint32_t lane, uint32_t buffer,
                        const Tile& tile, Place place, int32_t columns) const {
    stage<Columns>(codes, lane, buffer, tile.tokens - tile.row - place.row);
    __syncwarp();
    const int64_t row = (tile.begin & -align) + int64_t(align) * tile.group + tile.row + place.row;
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
      const uint32_t first = turned(row < rows ? codes[2 * p] : 0);
      const uint32_t second = turned(row + 8 < rows ? codes[2 * p + 1] : 0);
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
  __device__ static uint32_t turned(uint32_t row) {
    uint32_t column;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
  }

  __device__ static void store_word(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
  }
};

}  // namespace fusegen
