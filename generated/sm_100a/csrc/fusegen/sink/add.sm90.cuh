// Results added to what is in global memory, by TMA or by the warps themselves.
//
// The L2 cache, where TMA adds, does so at two thirds of the speed at which memory is read and
// written. Nobody waits for it, which is best where tiles take long; where they are so short that
// memory is what bounds them, their old values come into the buffers first and the warps add.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/loaded.sm90.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Whether a tile takes less time to multiply than to add to memory.
__device__ inline bool is_short(const Tile& tile) {
  constexpr int32_t kShort = 1280;  // tokens; measured: 1024 to 1536, with 8 and 16 bits
  return tile.k > 0 && tile.k <= kShort;
}

// The sink of one warp, which has `Values` of every tile.
template <class Result, class Values, int Buffers>
struct AddSink {
  TmaStore<Result, Write::add, Buffers> by_tma;
  LoadedValues<Result, Write::matrix, Values, Buffers> old;
  bool loads = false;  // old values come

  __device__ AddSink(const TmaStore<Result, Write::add, Buffers>& by_tma, CopyBarrier* loaded,
                     int32_t columns, int32_t row)
      : by_tma(by_tma), old(by_tma.map, loaded, columns, row) {}

  __device__ void start(const Tile& tile, Place) {
    loads = is_short(tile);
    if (loads && by_tma.lane == 0) old.start(by_tma.ring, tile);
  }

  template <class Function>
  __device__ void with(Function function) {
    if (loads) {
      LoadedStore<Result, Write::matrix, Values, Buffers, Add<Result>> by_warps{
          by_tma.map, by_tma.ring, old, by_tma.lane, {}};
      function(by_warps);
    } else {
      function(by_tma);
    }
  }

  __device__ void drain() { by_tma.drain(); }
};

}  // namespace fusegen
