// What becomes of a GEMM's sums between their accumulation and their storing.
//
// What a kernel is told of it (scales, a bias) has
//   begin<Values>(tile, place, columns, lane)   gives the visitor of one tile; called before the
//                                               contraction, which hides how long its loads take
// where `Values` is the type of the warp's fragment, `place` where that begins, `columns` how many
// the result has. A visitor has
//   visit(part, tile, place)                    changes values of a part of the tile, right before
//                                               it is stored; all lanes come to it together
// All values at once, before the first part is stored, would take registers beside those that other
// parts and what they meet have.
// Parts may reach past the tile's rows and the result's columns. Nothing is read for values there,
// which are never stored.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// The visitors of one tile, in the order in which they change its values.
template <class... Each>
struct Visitors : Each... {
  template <class Part>
  __device__ void visit([[maybe_unused]] const Part& part, [[maybe_unused]] const Tile& tile,
                        [[maybe_unused]] Place place) {
    (Each::visit(part, tile, place), ...);
  }
};
template <class... Each>
Visitors(Each...) -> Visitors<Each...>;

// What a kernel is told of all of them.
template <class... Each>
struct VisitorArguments : Each... {
  template <class Values>
  __device__ auto begin([[maybe_unused]] const Tile& tile, [[maybe_unused]] Place place,
                        [[maybe_unused]] int32_t columns, [[maybe_unused]] uint32_t lane) const {
    return Visitors{Each::template begin<Values>(tile, place, columns, lane)...};
  }
};
template <class... Each>
VisitorArguments(Each...) -> VisitorArguments<Each...>;

}  // namespace fusegen
