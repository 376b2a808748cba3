// The warps of a GEMM that multiply, visit and store.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/gemm/cta.sm90.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/result_sink.sm90.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/stages.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/gated_store.sm90.cuh"
#include "fusegen/sink/store_fragment.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// Whether a warpgroup multiplies although the tile has no rows for it. To leave that out is faster
// where groups are small. Where they are large and contractions too long for operands to stay in
// the L2 cache, the cluster would get ahead of the others of its wave, and either would read from
// memory what they could share: half as much again where that was measured (k = 7168, 16 bits).
template <class T>
__device__ bool stays_in_step(const Tile& tile) {
  constexpr int32_t kLargeGroup = 1024;  // tokens
  constexpr int32_t kLongBytes = 8192;   // of one row
  return T::kKind != Gemm::wgrad && !T::kPingpong && tile.rows > 0 &&
         tile.tokens >= kLargeGroup && tile.k >= kLongBytes / T::kElementBytes;
}

// Two warpgroups that own every second tile, in turns (pingpong), or one tile together
// (cooperative), where it is always everybody's turn.
template <class T>
struct Turns {
  Barrier* barriers;
  uint32_t part, lane;
  uint32_t phase;
  bool mine;

  // The first turn is the first warpgroup's, without waiting.
  __device__ Turns(Barrier* barriers, uint32_t part, uint32_t lane)
      : barriers(barriers),
        part(part),
        lane(lane),
        phase(part == 0),
        mine(!T::kPingpong || part == 0) {}

  // Whether the next tile is this warpgroup's.
  __device__ bool take() {
    const bool taken = !T::kPingpong || mine;
    mine = !T::kPingpong || !mine;
    return taken;
  }

  __device__ void wait() {
    if constexpr (T::kPingpong) barriers[part].wait(phase);
    phase ^= 1;
  }

  __device__ void pass() const {
    if (T::kPingpong && lane == 0) barriers[part ^ 1].arrive();
  }
};

// One of these warps. `Result` is the type of what is stored.
template <class T, class Result, class Mainloop, class Visits, class Change>
struct MathWarp {
  using Sums = typename Mainloop::Sums;
  using Values = typename Sums::Values;
  using Sink = ResultSink<T, Result, Values, Change>;

  Visits visits;
  int32_t columns;    // of the result
  int32_t first_row;  // of the warpgroup in a tile
  int32_t row;        // of this warp
  uint32_t lane;
  Mainloop mainloop;
  Sink sink;
  Turns<T> turns;

  // The `part`-th warpgroup's; `warp` counts within it.
  __device__ MathWarp(const Cta<T>& cta, typename Mainloop::Arguments arguments,
                      const Visits& visits, const CUtensorMap* map,
                      const Epilogue<Change, T::kStore>& epilogue, int32_t columns, uint32_t part,
                      uint32_t warp)
      : visits(visits),
        columns(columns),
        first_row(T::kPingpong ? 0 : int32_t(part) * T::kWaves * kMmaRows),
        row(first_row + int32_t(warp) * kChunkRows),
        lane(cta.lane),
        mainloop(StageReader<T>(cta.shared, cta.control().stages, first_row, cta.lane), arguments,
                 cta.shared, uint32_t(row) + cta.lane / 4),
        sink(ResultSinkOf<T, Result, Values, Change>::make(cta, map, epilogue, columns, row, part * 4 + warp)),
        turns(cta.control().turn, part, cta.lane) {}

  __device__ void run(const TileRing& ring) {
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      if (turns.take()) {
        compute(tile);
      } else {
        mainloop.pass_over(tile.k);
      }
    }
    sink.drain();
  }

 private:
  __device__ void compute(const Tile& tile) {
    const int32_t rows = tile.rows - first_row;
    // Known before visitors begin, which ask for tile.k, too: the compiler would otherwise write
    // all that follows a second time for tiles whose contraction is empty.
    const bool nothing = tile.k == 0 || (rows <= 0 && !stays_in_step<T>(tile));
    const Place place{row, tile.column};
    sink.start(tile, place);
    auto visitors = visits.template begin<Values>(tile, place, columns, lane);
    Sums sums;
    sums.clear();
    turns.wait();
    if (nothing) {
      skip(tile);
    } else {
      const int32_t width = is_gated(T::kStore) ? T::kTileN : columns - tile.column;
      mainloop.run(sums, tile, rows, width, [this] { turns.pass(); });
    }
    const Values fragment = sums.fragment(lane);
    if (adds(T::kStore) && tile.k == 0) return;
    if constexpr (is_gated(T::kStore)) {
      store_halves(fragment, visitors, sink, tile, row, columns / 2);
    } else {
      store_fragment(fragment, visitors, sink, tile, place, columns);
    }
  }

  __device__ void skip(const Tile& tile) {
    mainloop.skip(tile.k);
    if (T::kPingpong) __syncwarp();  // all lanes have seen this turn before it is passed on
    turns.pass();
  }
};

}  // namespace fusegen
