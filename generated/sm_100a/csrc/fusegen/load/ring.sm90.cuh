// Barriers in shared memory: the ring of operand stages and the ring of tile records.
#pragma once

#include <cstdint>

#include "fusegen/common/instructions.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A position in a ring of `Count` slots, with the parity of its current lap.
template <uint32_t Count>
struct Cursor {
  uint32_t slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    slot = slot == Count - 1 ? 0 : slot + 1;
    phase ^= slot == 0;
  }

  __device__ void advance(uint32_t steps) {
    const uint32_t target = slot + steps;
    phase ^= target / Count & 1;
    slot = target % Count;
  }
};

// Operand stages: `full` counts the bytes that TMA wrote, and lanes that copied others; `empty` the
// warps done reading.
template <int Stages>
struct StageBarriers {
  CopyBarrier full[Stages];
  Barrier empty[Stages];

  __device__ void init(uint32_t reading_warps, uint32_t copying_lanes = 0) {
    for (int i = 0; i < Stages; ++i) {
      full[i].init(1 + copying_lanes);
      empty[i].init(reading_warps);
    }
  }

  // One lane per CTA of the cluster: a neighbour may multicast into this stage only after both.
  template <int Cluster>
  __device__ void release(uint32_t slot, uint32_t lane) const {
    if constexpr (Cluster == 1) {
      if (lane == 0) empty[slot].arrive();
    } else {
      if (lane < Cluster) empty[slot].arrive(lane);
    }
  }
};

// Tile records, written by the scheduler warp and read by every other working thread.
struct TileRing {
  static constexpr int kSlots = 8;

  Tile tiles[kSlots];
  Barrier full[kSlots];
  Barrier empty[kSlots];

  __device__ void init(uint32_t reading_threads) {
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(1);
      empty[i].init(reading_threads);
    }
  }

  __device__ void write(Cursor<kSlots>& cursor, const Tile& tile) {
    empty[cursor.slot].wait(cursor.phase ^ 1);
    tiles[cursor.slot] = tile;
    full[cursor.slot].arrive();
    cursor.advance();
  }

  // Each thread that has read a record says so itself; after the last one nothing is written.
  __device__ Tile read(Cursor<kSlots>& cursor) const {
    full[cursor.slot].wait(cursor.phase);
    const Tile tile = tiles[cursor.slot];
    if (tile.group >= 0) empty[cursor.slot].arrive();
    cursor.advance();
    return tile;
  }
};

// Finds the CTA's tiles for all other warps, running ahead of them. One warp.
template <class Source>
__device__ void write_tiles(Source source, TileRing& ring, uint32_t lane) {
  Cursor<TileRing::kSlots> record;
  Tile tile;
  do {
    tile = source.next();
    if (lane == 0) ring.write(record, tile);
    __syncwarp();
  } while (tile.group >= 0);
}

}  // namespace fusegen
