// Scales of decoded operands that are constant along the contraction: they multiply the finished
// sums, each operand's by itself, in fp32.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/scales.cuh"

namespace fusegen {

// `of_a` and `of_b` say where the scales are: see gemm.h.
template <Gemm kind, EndScale of_a, EndScale of_b>
struct EndScales {
  static constexpr bool kRows = of_a == EndScale::row || of_b == EndScale::row;

  const float* a;
  const float* b;
  int32_t rows_a;  // wgrad: rows of A in one group

  template <class Values>
  __device__ auto begin(const Tile& tile, Place place, int32_t columns, uint32_t lane) const {
    if constexpr (kRows) {
      RowAndColumnFactors<Values> out{};
      if (tile.k != 0) fill(out, tile, place, columns, lane);
      return out;
    } else {
      return TileFactor{tile.k == 0 ? 0.f : of_group<of_a>(a, tile) * of_group<of_b>(b, tile)};
    }
  }

 private:
  template <class Factors>
  __device__ void fill(Factors& out, const Tile& tile, Place place, int32_t columns,
                       uint32_t lane) const {
    if constexpr (of_a == EndScale::row) {
      out.template load_rows<kind>(a, rows_a, tile, place, lane);
    } else {
      out.set_rows(of_group<of_a>(a, tile));
    }
    if constexpr (of_b == EndScale::row) {
      out.load_columns(b, tile, place, columns, lane);
    } else {
      out.set_columns(of_group<of_b>(b, tile));
    }
  }

  // The one scale of an operand in a tile's group.
  template <EndScale of>
  __device__ static float of_group(const float* scales, const Tile& tile) {
    static_assert(of != EndScale::row);
    if constexpr (of == EndScale::none) return 1.f;
    return __ldg(scales + tile.group);
  }
};

}  // namespace fusegen
