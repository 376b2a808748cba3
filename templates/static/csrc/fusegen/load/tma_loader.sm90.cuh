// Operands from global memory into the ring of stages, by TMA.
#pragma once

#include <cstdint>

#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Stages that hold operands alone.
struct NoExtras {
  static constexpr int kBytes = 0;

  __device__ NoExtras(const void* = nullptr) {}

  __device__ void prefetch() const {}
  __device__ void load(CopyBarrier&, uint8_t*, const Tile&, int32_t) const {}
};

// `Coordinates` says where boxes lie, `Extras` what comes with every stage.
template <class T, class Coordinates, class Extras>
struct TmaLoader {
  const CUtensorMap* a;
  const CUtensorMap* b;
  Extras extras;

  __device__ void prefetch() const {
    prefetch_descriptor(a);
    prefetch_descriptor(b);
    extras.prefetch();
  }

  // Every stage of every tile. One thread; `rank` is its CTA's in the cluster, `columns` are those
  // of the result.
  __device__ void run(uint8_t* shared, StageBarriers<T::kStages>& barriers, const TileRing& ring,
                      int32_t columns, uint32_t rank) const {
    Cursor<T::kStages> at;
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      const Boxes boxes = boxes_of(tile, columns);
      for (int32_t k = 0; k < tile.k; k += T::kTileK) {
        barriers.empty[at.slot].wait(at.phase ^ 1);
        CopyBarrier& full = barriers.full[at.slot];
        full.arrive_and_expect_tx(boxes.bytes);
        extras.load(full, shared + T::kExtraAt + at.slot * Extras::kBytes, tile, k);
        fill(full, shared + at.slot * T::kStageBytes, tile, k, boxes, rank);
        at.advance();
      }
    }
  }

 private:
  // The boxes of a tile's operands that exist.
  struct Boxes {
    int a, b;
    uint32_t bytes;  // that come with every stage
  };

  __device__ static Boxes boxes_of(const Tile& tile, int32_t columns) {
    const int boxes_a = boxes_in(tile.rows, T::kBoxRowsA, T::kBoxesA);
    const int boxes_b = boxes_in(columns - tile.column, T::kBoxWidthB, T::kBoxesB);
    const uint32_t bytes = boxes_a * T::kBoxBytesA + boxes_b * T::kBoxBytesB + Extras::kBytes;
    return {boxes_a, boxes_b, bytes};
  }

  // A shared operand's boxes alternate between the two CTAs.
  __device__ void fill(CopyBarrier& full, uint8_t* stage, const Tile& tile, int32_t k,
                       const Boxes& boxes, uint32_t rank) const {
    const bool share_a = T::kCluster > 1 && tile.share == Share::a;
    const bool share_b = T::kCluster > 1 && tile.share == Share::b;
#pragma unroll
    for (int box = 0; box < T::kBoxesA; ++box) {
      if (box >= boxes.a || (share_a && box % 2 != rank)) continue;
      load_box<Coordinates::kRankA>(a, full, stage + box * T::kBoxBytesA,
                                    Coordinates::a(tile, tile.row + box * T::kBoxRowsA, k),
                                    share_a);
    }
#pragma unroll
    for (int box = 0; box < T::kBoxesB; ++box) {
      if (box >= boxes.b || (share_b && box % 2 != rank)) continue;
      load_box<Coordinates::kRankB>(b, full, stage + T::kBytesA + box * T::kBoxBytesB,
                                    Coordinates::b(tile, tile.column + box * T::kBoxWidthB, k),
                                    share_b);
    }
  }
};

}  // namespace fusegen
