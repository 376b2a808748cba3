// A bias of each column of a group.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// What fprop is told.
template <class Element>
struct Bias {
  const Element* values;    // [groups, n] or nullptr
  const float* row_scales;  // [tokens]; read where each row's bias is times its scale
};

// The biases of the columns that a lane has.
template <class Element>
struct GroupBias {
  const Element* values;  // [groups, columns] or nullptr
  int32_t groups, columns;

  // Rows that no group has get none.
  __device__ bool has(const Tile& tile) const { return values != nullptr && tile.group < groups; }

  // Calls add(strip, four, pair) for every 8 columns of every strip: the lane's four values there
  // and the biases of their two columns.
  template <class Values, class Add>
  __device__ void for_each(const Values& fragment, const Tile& tile, Place place, Add add) const {
    using Pair = typename PairOf<Element>::type;
    const Element* const from = values + int64_t(tile.group) * columns + place.column;
#pragma unroll
    for (int i = 0; i < Values::kCount; i += 4) {
      const int32_t column = fragment.column(i);
      if (column >= columns - place.column) continue;
      const float2 pair = widen_pair(*reinterpret_cast<const Pair*>(from + column));
#pragma unroll
      for (int strip = 0; strip < Values::kStrips; ++strip) {
        add(strip, fragment.values[strip] + i, pair);
      }
    }
  }
};

template <class Element>
struct AddBias {
  GroupBias<Element> bias;

  template <class Values>
  __device__ AddBias begin(const Tile&, Place, int32_t, uint32_t) const {
    return *this;
  }

  template <class Values>
  __device__ void visit(const Values& fragment, const Tile& tile, Place place) {
    if (!bias.has(tile)) return;
    bias.for_each(fragment, tile, place, [](int, float* four, float2 pair) {
      four[0] += pair.x;
      four[1] += pair.y;
      four[2] += pair.x;
      four[3] += pair.y;
    });
  }
};

}  // namespace fusegen
