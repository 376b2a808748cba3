// A bias of each column of a group, times a scale of each row.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/bias.cuh"

namespace fusegen {

// The visitor of one tile, of which a warp has `Strips` strips, `Columns` wide.
template <class Element, int Strips, int Columns>
struct ScaledBias {
  GroupBias<Element> bias;
  const float* row_scales;   // [tokens]
  float scales[Strips][2];  // of the lane's two rows in every strip of the part visited last

  // The first columns of a strip bring its scales, which those behind them share.
  template <class Values>
  __device__ void visit(const Values& fragment, const Tile& tile, Place place) {
    if (!bias.has(tile)) return;
    if ((place.column - tile.column) % Columns == 0) load_scales(fragment, tile, place);
    bias.for_each(fragment, tile, place, [this](int strip, float* four, float2 pair) {
      four[0] += scales[strip][0] * pair.x;
      four[1] += scales[strip][0] * pair.y;
      four[2] += scales[strip][1] * pair.x;
      four[3] += scales[strip][1] * pair.y;
    });
  }

 private:
  // Rows past the group's end are never stored, so they may have its last token's.
  template <class Values>
  __device__ void load_scales(const Values& fragment, const Tile& tile, Place place) {
    static_assert(Values::kStrips <= Strips);
    const int32_t last = tile.begin + tile.tokens - 1;
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t row = tile.row + place.row + fragment.row(i / 2, i % 2 * 2);
      scales[i / 2][i % 2] = __ldg(row_scales + min(tile.begin + row, last));
    }
  }
};

template <class Element>
struct AddScaledBias {
  GroupBias<Element> bias;
  const float* row_scales;

  template <class Values>
  __device__ ScaledBias<Element, Values::kStrips, Values::kColumns> begin(const Tile&, Place,
                                                                          int32_t,
                                                                          uint32_t) const {
    return {bias, row_scales, {}};
  }
};

}  // namespace fusegen
