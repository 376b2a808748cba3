// What the MMAs of a warp add to: the sums of its part of a tile.
//
// The way in which sums are added up has
//   kInterval                        elements of the contraction to one partial sum; 0: there are none
//   begin<Config>(fragment, tile, place, columns)
//                                    gives what follows, for one tile whose totals are the fragment's
// and that has
//   accumulators()                   what MMAs add to
//   end_stage(last)                  after the MMAs of each stage; `last`: of the tile
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

struct RunningWarpSums {
  static constexpr int kInterval = 0;

  template <class Values>
  struct OfTile {
    const Values& total;

    __device__ auto& accumulators() { return total.values; }
    __device__ void end_stage(bool) {}
  };

  template <class Config, class Values>
  __device__ OfTile<Values> begin(const Values& total, const Tile&, Place, int32_t) const {
    return {total};
  }
};

}  // namespace fusegen
