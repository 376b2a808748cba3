// Values of a GEMM with their coordinates, as the lanes of one warp hold them.
//
// Every MMA with 16 x 8 results leaves them alike, mma.sync and one warp's part of wgmma: of 8
// columns a lane has two neighbours in row lane / 4 and two in that row + 8.
#pragma once

#include <cstdint>

namespace fusegen {

// Where a fragment begins: rows count from the tile's first, columns are those of the result.
struct Place {
  int32_t row, column;
};

// `Strips` times 16 rows, `StripStep` rows from one to the next, by `Columns` columns. This is a
// view: the registers belong to whoever accumulated in them.
template <int Columns, int Strips = 1, int StripStep = 16>
struct Fragment {
  static constexpr int kColumns = Columns;
  static constexpr int kStrips = Strips;
  static constexpr int kStripStep = StripStep;
  static constexpr int kRows = 16;            // of a strip
  static constexpr int kCount = Columns / 2;  // values of a lane in a strip
  static_assert(Columns % 8 == 0 && StripStep >= kRows);

  float (&values)[Strips][kCount];
  uint32_t lane;
  int first_strip = 0, first_column = 0;  // of a part, in the fragment that it is of

  // Of value i of a strip.
  __device__ int32_t row(int strip, int i) const {
    return strip * StripStep + int32_t(lane / 4) + i / 2 % 2 * 8;
  }
  __device__ int32_t column(int i) const { return i / 4 * 8 + int32_t(lane % 4) * 2 + i % 2; }

  // Calls visit(row, column, first, second) with every two neighbours of a row.
  template <class Visit>
  __device__ void for_each_pair(Visit visit) const {
#pragma unroll
    for (int strip = 0; strip < Strips; ++strip) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        visit(row(strip, i), column(i), values[strip][i], values[strip][i + 1]);
      }
    }
  }

  // Columns [index Width, (index + 1) Width) of one strip: its values are neighbours.
  template <int Width>
  __device__ Fragment<Width> part(int strip, int index) const {
    static_assert(Columns % Width == 0);
    return {reinterpret_cast<float(&)[1][Width / 2]>(values[strip][index * (Width / 2)]), lane, strip,
            index * Width};
  }
};

}  // namespace fusegen
