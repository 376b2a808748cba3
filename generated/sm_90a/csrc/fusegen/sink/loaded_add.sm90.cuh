// Results added by the warps: old values come into the buffers by TMA before they are wanted, sums
// go the same way back.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Old values of one warp's part of a tile, `Values`, in the order in which they are added to.
template <class Result, class Values, int Buffers>
struct OldValues {
  static constexpr int kColumns = kStoreColumns<Result>;

  CopyBarrier* loaded;    // [Buffers]: old values have come
  int32_t columns;        // of the result
  uint32_t parities = 0;  // of `loaded`, a bit each
  uint32_t next_slot = 0;
  int32_t next_row = 0, end_row = 0;
  int32_t next_column = 0;

  __device__ OldValues(CopyBarrier* loaded, int32_t columns) : loaded(loaded), columns(columns) {}

  // As many as the buffers hold, of the warp's part at `place`. Lane 0.
  __device__ void start(const CUtensorMap* map, const ChunkRing<Buffers>& ring, const Tile& tile,
                        Place place) {
    cute::tma_store_wait<0>();
    next_slot = ring.slot;
    next_row = place.row;
    end_row = min(place.row + Values::kStrips * Values::kStripStep, tile.rows);
    next_column = tile.column;
    for (int i = 0; i < Buffers; ++i) load_next(map, ring, tile);
  }

  __device__ void wait(uint32_t slot) {
    loaded[slot].wait(parities >> slot & 1);
    parities ^= 1u << slot;
  }

  // Into the buffer before the one just stored from, whose own store need not be waited for.
  // Lane 0.
  __device__ void load_behind(const CUtensorMap* map, const ChunkRing<Buffers>& ring,
                              const Tile& tile) {
    if (Buffers > 1 && next_slot == ring.slot) return;  // the tile's first: there is none behind
    cute::tma_store_wait<Buffers == 1 ? 0 : 1>();
    load_next(map, ring, tile);
  }

 private:
  __device__ void load_next(const CUtensorMap* map, const ChunkRing<Buffers>& ring,
                            const Tile& tile) {
    if (next_row >= end_row) return;
    CopyBarrier& barrier = loaded[next_slot];
    barrier.arrive_and_expect_tx(kChunkBytes);
    load_box<3>(map, barrier, ring.buffers + next_slot * kChunkBytes,
                result_coordinates<Write::matrix>(tile, {next_row, next_column}));
    next_slot = ring.after(next_slot);
    next_column += kColumns;
    if (next_column >= min(tile.column + Values::kColumns, columns)) {
      next_column = tile.column;
      next_row += Values::kStripStep;
    }
  }
};

// The sink of one tile's parts.
template <class Result, class Values, int Buffers>
struct LoadedAdd {
  static constexpr int kColumns = kStoreColumns<Result>;

  const CUtensorMap* map;
  ChunkRing<Buffers>& ring;
  OldValues<Result, Values, Buffers>& old;
  uint32_t lane;

  __device__ void put(const Fragment<kColumns>& part, const Tile& tile, Place place) {
    old.wait(ring.slot);
    WriteChunk<Result, true>::run(part, ring.address());
    cute::tma_store_fence();
    __syncwarp();
    if (lane == 0) {
      send_chunk<Write::matrix>(map, ring.address(), tile, place);
      old.load_behind(map, ring, tile);
    }
    ring.advance();
  }
};

}  // namespace fusegen
