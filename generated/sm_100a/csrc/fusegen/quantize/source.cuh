// Where the quantise and amax kernels read their input: the one place that loads its elements.
//
// A source is a kernel parameter, so it must be trivially copyable, and may hold whatever its
// elements are made from. Both kernels of a step call it on the same elements, in any order, and
// must get the same bits.
#pragma once

#include "fusegen/quantize/tile.cuh"

namespace fusegen {

namespace quantizing {

// A tensor in memory: `in.input`, [rows, in.columns], row-major.
template <class Element_>
struct TensorSource {
  using Element = Element_;
  static constexpr int kBlocksPerSm = 4;  // that its registers leave room for

  // The calling lane's part of a tile: 4 columns from `column` on of 16 rows from `row` on, rows
  // of the whole input. Rows from `rows` on, which may be 0 or less, and columns from in.columns on
  // are zeros, and must not be touched. `row` and `rows` are the same in a warp.
  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments& in, int64_t row,
                                       int column, int rows) const {
    const uint32_t pitch = uint32_t(in.columns) * uint32_t(sizeof(Element));
    const char* from = opaque(reinterpret_cast<const char*>(
        static_cast<const Element*>(in.input) + row * in.columns + column));
    const int count = column < in.columns ? rows : 0;
    if (count >= kWarpRows) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        load_row(values, r, from);
        from = opaque(from + pitch);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        values.pairs[r][0] = values.pairs[r][1] = 0;
        if (r < count) load_row(values, r, from + uint64_t(pitch) * r);
      }
    }
  }

 private:
  __device__ __forceinline__ static void load_row(Values<Element>& values, int r,
                                                  const char* from) {
    const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(from));
    values.pairs[r][0] = loaded.x;
    values.pairs[r][1] = loaded.y;
  }
};

}  // namespace quantizing

using quantizing::TensorSource;

}  // namespace fusegen
