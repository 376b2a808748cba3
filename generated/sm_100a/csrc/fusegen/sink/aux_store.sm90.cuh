// Results into global memory by TMA twice: as they are, where somebody asks for that, and changed.
//
// Both take buffers of one ring, one behind the other: the change is computed while TMA reads what
// it is computed of. That is rounded once, before it is known whether anybody asks: the compiler
// would otherwise keep it rounded and not across the branch, for which there are no registers.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// The sink of one warp; `Change` loads nothing.
template <class Result, int Buffers, class Change>
struct AuxStore {
  using Changed = TmaStore<Result, Write::rows, Buffers, Change>;
  static constexpr int kColumns = Changed::kColumns;  // of a part

  Changed changed;
  const CUtensorMap* aux;  // nullptr: nobody asks

  __device__ void start(const Tile&, Place) {}

  // Calls function(sink) with the sink of a tile's parts.
  template <class Function>
  __device__ void with(Function function) {
    function(*this);
  }

  __device__ void put(const Fragment<kColumns>& part, const Tile& tile, Place place) {
    using Chunk = WriteChunk<Result>;
    const auto rounded = Chunk::round(part);
    const auto write = [&](const CUtensorMap* to, const auto& change) {
      changed.send(to, tile, place, [&](uint32_t buffer) {
        Chunk::write(rounded, changed.lane, buffer, change);
      });
    };
    if (aux != nullptr) write(aux, Keep());
    write(changed.map, changed.change.begin(tile));
  }

  __device__ void drain() { changed.drain(); }
};

}  // namespace fusegen
