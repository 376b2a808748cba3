// Finished values through the visitors of their parts into a sink.
//
// The sink of a kernel has
//   start(tile, place)    before the contraction; `place` is that of the warp's fragment
//   with(function)        calls function(sink) with the sink of the tile's parts
//   drain()               after the last tile
// and the sink of parts
//   kColumns              columns of a part, which has 16 rows
//   put(part, tile, place)
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// All of a warp's fragment at `place` that the tile and the result have, strip after strip from
// left to right. `columns` are those of the result.
template <class Values, class Visitors, class Sink>
__device__ void store_fragment(const Values& fragment, Visitors& visitors, Sink& sink,
                               const Tile& tile, Place place, int32_t columns) {
#pragma unroll
  for (int strip = 0; strip < Values::kStrips; ++strip) {
    const int32_t row = place.row + strip * Values::kStripStep;
    if (row >= tile.rows) return;
    sink.with([&](auto& of_parts) {
      constexpr int kWidth = std::decay_t<decltype(of_parts)>::kColumns;
      static_assert(Values::kColumns % kWidth == 0);
#pragma unroll
      for (int index = 0; index < Values::kColumns / kWidth; ++index) {
        const Place at{row, place.column + index * kWidth};
        if (at.column >= columns) return;
        const auto part = fragment.template part<kWidth>(strip, index);
        visitors.visit(part, tile, at);
        of_parts.put(part, tile, at);
      }
    });
  }
}

}  // namespace fusegen
