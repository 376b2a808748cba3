// What becomes of a GEMM's sums between their accumulation and their storing.
//
// What a kernel is told of it (scales, a bias) has
//   begin<Values>(tile, place, columns, lane)   gives the visitor of one tile; called before the
//                                               contraction, which hides how long its loads take
// where `Values` is the type of the warp's fragment, `place` where that begins, `columns` how many
// the result has. A visitor has
//   visit(fragment, tile, place)                changes values of any part of the tile
//   kWhole                                      it visits all that the warp has of a tile at once,
//                                               since what lanes exchange serves all of it; others
//                                               visit part after part, each right before its store
// Fragments may reach past the tile's rows and the result's columns. Nothing is read for values
// there, which are never stored.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

template <bool... whole>
constexpr bool wholes_come_first() {
  bool good = true, part_seen = false;
  ((good = good && !(whole && part_seen), part_seen = part_seen || !whole), ...);
  return good;
}

// The visitors of one tile, in the order in which they change its values.
template <class... Each>
struct Visitors : Each... {
  static_assert(wholes_come_first<Each::kWhole...>(), "parts are visited after the whole");

  template <class Values>
  __device__ void visit_whole([[maybe_unused]] const Values& fragment,
                              [[maybe_unused]] const Tile& tile, [[maybe_unused]] Place place) {
    (visit_if<true, Each>(fragment, tile, place), ...);
  }

  template <class Values>
  __device__ void visit_part([[maybe_unused]] const Values& fragment,
                              [[maybe_unused]] const Tile& tile, [[maybe_unused]] Place place) {
    (visit_if<false, Each>(fragment, tile, place), ...);
  }

 private:
  template <bool whole, class One, class Values>
  __device__ void visit_if(const Values& fragment, const Tile& tile, Place place) {
    if constexpr (One::kWhole == whole) One::visit(fragment, tile, place);
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
