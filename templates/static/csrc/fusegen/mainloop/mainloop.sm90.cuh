// Operands from global memory into stages (one thread), and from stages through the tensor cores
// into accumulators (one warpgroup).
#pragma once

#include <cstdint>

#include "fusegen/gemm/config.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"

namespace fusegen {

template <Gemm kind>
__device__ BoxCoordinates coordinates_a(const Tile& tile, int32_t row, int32_t k) {
  if constexpr (kind == Gemm::wgrad) return ragged_coordinates(row, tile.begin, tile.tokens, k);
  return {k, tile.begin + row, 0, 0};
}

template <Gemm kind>
__device__ BoxCoordinates coordinates_b(const Tile& tile, int32_t column, int32_t k) {
  if constexpr (kind == Gemm::wgrad) {
    return ragged_coordinates(column, tile.begin, tile.tokens, k);
  }
  if constexpr (kind == Gemm::dgrad) return {column, k, tile.group, 0};
  return {k, column, tile.group, 0};
}

// The boxes of one operand that exist; a shared operand's boxes alternate between the two CTAs.
__device__ inline int existing_boxes(int32_t extent, int width, int boxes) {
  return extent <= 0 ? 0 : min(int(blocks(extent, width)), boxes);
}

// Loads every stage of every tile. One thread.
template <Gemm kind, class T, class Config>
__device__ void load_operands(const CUtensorMap* map_a, const CUtensorMap* map_b,
                              uint8_t* stages, Control<T>& control, int32_t columns,
                              uint32_t rank) {
  Cursor<T::kStages> at;
  Cursor<TileRing::kSlots> record;
  for (Tile tile = control.ring.read(record); tile.group >= 0; tile = control.ring.read(record)) {
    const int boxes_a = existing_boxes(tile.rows, 64, T::kBoxesA);
    const int boxes_b = existing_boxes(columns - tile.column, T::kBoxWidthB, T::kBoxesB);
    const uint32_t bytes = boxes_a * T::kBoxBytesA + boxes_b * T::kBoxBytesB;
    const bool share_a = tile.share == Share::a;
    const bool share_b = tile.share == Share::b;
    for (int32_t k = 0; k < tile.k; k += Config::tile_k) {
      control.stages.empty[at.slot].wait(at.phase ^ 1);
      CopyBarrier& full = control.stages.full[at.slot];
      full.arrive_and_expect_tx(bytes);
      uint8_t* const stage = stages + at.slot * T::kStageBytes;
#pragma unroll
      for (int box = 0; box < T::kBoxesA; ++box) {
        if (box >= boxes_a || (share_a && box % 2 != rank)) continue;
        load_box<T::kRankA>(map_a, full, stage + box * T::kBoxBytesA,
                            coordinates_a<kind>(tile, tile.row + box * 64, k), share_a);
      }
#pragma unroll
      for (int box = 0; box < T::kBoxesB; ++box) {
        if (box >= boxes_b || (share_b && box % 2 != rank)) continue;
        load_box<T::kRankB>(
            map_b, full, stage + T::kBytesA + box * T::kBoxBytesB,
            coordinates_b<kind>(tile, tile.column + box * T::kBoxWidthB, k), share_b);
      }
      at.advance();
    }
  }
}

// A math warpgroup's view of the stages.
template <class T, class Config>
struct StageReader {
  uint64_t a, b;  // descriptors of this warpgroup's operands in stage 0
  Control<T>& control;
  uint32_t lane;
  Cursor<T::kStages> at;

  __device__ uint64_t stage_offset() const { return at.slot * (T::kStageBytes / 16); }

  __device__ void release(uint32_t slot) {
    control.stages.template release<Config::cluster>(slot, lane);
  }

  // A warpgroup without rows of its own still takes part in every stage's handshake.
  __device__ void skip(int32_t k) {
    for (; k > 0; k -= Config::tile_k) {
      control.stages.full[at.slot].wait(at.phase);
      __syncwarp();
      release(at.slot);
      at.advance();
    }
  }
};

// The contraction of one tile by one warpgroup, in one running accumulator. Keeps one batch of MMAs
// in flight, so a stage is released one step after its MMAs were issued.
template <Gemm kind, class T, class Config>
struct Contraction : StageReader<T, Config> {
  using Base = StageReader<T, Config>;
  using Base::a, Base::b, Base::control, Base::at, Base::release, Base::stage_offset;
  using Mma = typename T::Mma;
  static constexpr int kSteps = Config::tile_k / T::kMmaK;

  uint32_t previous = 0;  // stage of the batch in flight
  bool in_flight = false;

  template <int Used, int Width>
  __device__ void issue(Accumulators<T::kWaves, Config::tile_n>& d, int step) {
    Mma::template step<Used, Width>(d, a + stage_offset() + step * kKStep<T::kMajorA>,
                                    b + stage_offset() + step * kKStep<T::kMajorB>);
  }

  // One stage, or the first `Steps` MMA steps of it. Returns with its MMAs in flight and the stage
  // before it released.
  template <int Used, int Width, int Steps>
  __device__ void multiply_stage(Accumulators<T::kWaves, Config::tile_n>& d) {
    control.stages.full[at.slot].wait(at.phase);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Steps; ++step) issue<Used, Width>(d, step);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (in_flight) release(previous);
    in_flight = true;
    previous = at.slot;
    at.advance();
  }

  // Calls `issued` when the last MMA is on its way. Where the contraction runs over tokens, the
  // last stage gets no more MMA steps than it has tokens for.
  template <int Used, int Width, class Issued>
  __device__ void run(Accumulators<T::kWaves, Config::tile_n>& d, int32_t k, Issued issued) {
    static_assert(kSteps == 4);
    const int last_steps = kind == Gemm::wgrad ? blocks(k, T::kMmaK) % kSteps : 0;
    const int whole = int(blocks(k, Config::tile_k)) - (last_steps > 0);
    in_flight = false;
    d.fence();
    for (int i = 0; i < whole; ++i) multiply_stage<Used, Width, kSteps>(d);
    if (last_steps == 1) multiply_stage<Used, Width, 1>(d);
    if (last_steps == 2) multiply_stage<Used, Width, 2>(d);
    if (last_steps == 3) multiply_stage<Used, Width, 3>(d);
    issued();
    cute::warpgroup_wait<0>();
    d.fence();
    release(previous);
  }

  // Column blocks at the right edge take MMAs no wider than they need.
  template <int Used, class Issued>
  __device__ void run_width(Accumulators<T::kWaves, Config::tile_n>& d, const Tile& tile,
                            int32_t width, Issued issued) {
    if (Config::tile_n > 64 && width <= 64) {
      run<Used, Config::tile_n < 64 ? Config::tile_n : 64>(d, tile.k, issued);
    } else if (Config::tile_n > 128 && width <= 128) {
      run<Used, Config::tile_n < 128 ? Config::tile_n : 128>(d, tile.k, issued);
    } else {
      run<Used, Config::tile_n>(d, tile.k, issued);
    }
  }
};

// 16-bit operands, as run_cta wants them.
template <Gemm kind, class T, class Config>
struct PlainOperands {
  using Product = Contraction<kind, T, Config>;

  const CUtensorMap* a;
  const CUtensorMap* b;

  __device__ void prefetch() const {
    prefetch_descriptor(a);
    prefetch_descriptor(b);
  }

  __device__ void load(uint8_t* stages, Control<T>& control, int32_t columns,
                       uint32_t rank) const {
    load_operands<kind, T, Config>(a, b, stages, control, columns, rank);
  }

  __device__ void prepare(Product&, uint8_t*, uint32_t) const {}
};

}  // namespace fusegen
