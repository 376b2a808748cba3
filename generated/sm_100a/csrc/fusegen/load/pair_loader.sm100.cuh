// Operands from global memory into the stages of one CTA of a pair, by TMA: its rows of A, and its half
// of the columns of B. What it loads is told by its own barrier; nothing is multicast.
#pragma once

#include <cstdint>

#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/load/tma_loader.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Its parameters are those of `TmaLoader`. Tiles of the ring have the CTA's rows and all columns.
template <class T, class Coordinates, class Extras>
struct PairLoader {
  const CUtensorMap* a;
  const CUtensorMap* b;
  Extras extras;

  __device__ void prefetch() const {
    prefetch_descriptor(a);
    prefetch_descriptor(b);
    extras.prefetch();
  }

  // One thread; `columns` are those of the result.
  __device__ void run(uint8_t* shared, StageBarriers<T::kStages>& barriers, const TileRing& ring,
                      int32_t columns, uint32_t rank) const {
    Cursor<T::kStages> at;
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      const int32_t column = tile.column + int32_t(rank) * T::kLoadedN;
      const int boxes_a = boxes_in(tile.rows, T::kBoxRowsA, T::kBoxesA);
      const int boxes_b = boxes_in(columns - column, T::kBoxWidthB, T::kBoxesB);
      const uint32_t bytes = boxes_a * T::kBoxBytesA + boxes_b * T::kBoxBytesB + Extras::kBytes;
      for (int32_t k = 0; k < tile.k; k += T::kTileK) {
        barriers.empty[at.slot].wait(at.phase ^ 1);
        CopyBarrier& full = barriers.full[at.slot];
        full.arrive_and_expect_tx(bytes);
        extras.load(full, shared + T::kExtraAt + at.slot * Extras::kBytes, tile, k);
        uint8_t* const stage = shared + at.slot * T::kStageBytes;
        for (int box = 0; box < boxes_a; ++box) {
          load_box<Coordinates::kRankA>(a, full, stage + box * T::kBoxBytesA,
                                        Coordinates::a(tile, tile.row + box * T::kBoxRowsA, k));
        }
        for (int box = 0; box < boxes_b; ++box) {
          load_box<Coordinates::kRankB>(b, full, stage + T::kBytesA + box * T::kBoxBytesB,
                                        Coordinates::b(tile, column + box * T::kBoxWidthB, k));
        }
        at.advance();
      }
    }
  }
};

}  // namespace fusegen
