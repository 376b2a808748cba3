// Results that meet what a tensor has in their place: its values come into the buffers by TMA
// before they are wanted, what the warps make of both goes the same way back.
#pragma once


#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A tensor's values in the place of one warp's part of a tile, `Values`, in the order in which they
// are wanted.
template <class Result, Write write, class Values, int Buffers>
struct LoadedValues {
  static constexpr int kColumns = kStoreColumns<Result>;
  static constexpr int kRank = write == Write::rows ? 4 : 3;

  const CUtensorMap* map;
  CopyBarrier* loaded;    // [Buffers]: values have come
  int32_t columns;        // of the result
  int32_t row;            // of the warp's part in every tile
  uint32_t parities = 0;  // of `loaded`, a bit each

  __device__ LoadedValues(const CUtensorMap* map, CopyBarrier* loaded, int32_t columns, int32_t row)
      : map(map), loaded(loaded), columns(columns), row(row) {}

  // As many as the buffers hold. Lane 0.
  __device__ void start(const ChunkRing<Buffers>& ring, const Tile& tile) {
    wait_for_stores<0>();
    uint32_t slot = ring.slot;
    for (int i = 0; i < Buffers; ++i, slot = ring.after(slot)) {
      load(ring, slot, tile, {row, tile.column + i * kColumns});
    }
  }

  __device__ void wait(uint32_t slot) {
    loaded[slot].wait(parities >> slot & 1);
    parities ^= 1u << slot;
  }

  // Into the buffer before the one that the part at `place` was just stored from, whose own store
  // need not be waited for. Lane 0.
  __device__ void load_behind(const ChunkRing<Buffers>& ring, const Tile& tile, Place place) {
    const bool first = place.row == row && place.column == tile.column;
    if (Buffers > 1 && first) return;  // there is none behind
    wait_for_stores<Buffers == 1 ? 0 : 1>();
    constexpr int kAhead = Buffers == 1 ? 1 : Buffers - 1;  // parts from this one to the wanted one
    const uint32_t slot = Buffers == 1 ? ring.slot : ring.before(ring.slot);
    load(ring, slot, tile, {place.row, place.column + kAhead * kColumns});
  }

 private:
  // The part that `at` is, if columns went on in the strips below.
  __device__ void load(const ChunkRing<Buffers>& ring, uint32_t slot, const Tile& tile, Place at) {
    const int32_t left = columns - tile.column;
    const int32_t width = left < Values::kColumns ? (left + kColumns - 1) / kColumns * kColumns
                                                  : Values::kColumns;
    while (at.column >= tile.column + width) {
      at.column -= width;
      at.row += Values::kStripStep;
    }
    if (at.row >= min(row + Values::kStrips * Values::kStripStep, tile.rows)) return;
    CopyBarrier& barrier = loaded[slot];
    barrier.arrive_and_expect_tx(kChunkBytes);
    load_box<kRank>(map, barrier, ring.buffers + slot * kChunkBytes,
                    result_coordinates<write>(tile, at));
  }
};

// The sink of one tile's parts.
template <class Result, Write write, class Values, int Buffers, class Change>
struct LoadedStore {
  static constexpr int kColumns = kStoreColumns<Result>;
  static_assert(Change::kLoads);

  const CUtensorMap* map;
  ChunkRing<Buffers>& ring;
  LoadedValues<Result, write, Values, Buffers>& others;
  uint32_t lane;
  Change change;

  __device__ void put(const Fragment<kColumns>& part, const Tile& tile, Place place) {
    others.wait(ring.slot);
    WriteChunk<Result>::template run<true>(part, ring.address(), change.begin(tile));
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      send_chunk<write>(map, ring.address(), tile, place);
      others.load_behind(ring, tile, place);
    }
    ring.advance();
  }
};

// The sink of one warp, which has `Values` of every tile, whose rows are tokens.
template <class Result, class Values, int Buffers, class Change>
struct LoadedSink {
  static constexpr Write kWrite = Write::rows;

  const CUtensorMap* map;
  ChunkRing<Buffers> ring;
  LoadedValues<Result, kWrite, Values, Buffers> others;
  uint32_t lane;
  Change change;

  __device__ void start(const Tile& tile, Place) {
    if (lane == 0) others.start(ring, tile);
  }

  template <class Function>
  __device__ void with(Function function) {
    LoadedStore<Result, kWrite, Values, Buffers, Change> parts{map, ring, others, lane, change};
    function(parts);
  }

  __device__ void drain() {
    if (lane == 0) wait_for_stores<0>();
  }
};

}  // namespace fusegen
