// Grouped and dense GEMM for sm_90a: bf16 or fp16 in and out, fp32 accumulation; weight gradients in
// fp32 where a module keeps them so.
//
// One persistent kernel serves y = x w^T + bias, dx = dy w and dw = dy^T x (see `Gemm`), over
// groups of tokens whose sizes only the device knows, or over one dense matrix. Warps by role:
//   warpgroup 0     warp 0 loads operands by TMA, warp 1 finds tiles (schedule.cuh)
//   the others      multiply and store (mainloop/mainloop.sm90.cuh, sink/epilogue.sm90.cuh)
// Cooperative: two or three math warpgroups work on one tile, an equal part of its rows each, and
// never wait for each other, so that one's epilogue overlaps the others' MMAs. Pingpong: each of two
// owns every second tile, in turns, which hides whole epilogues where contractions are short.
// Operands wait in a ring of stages (load/ring.sm90.cuh). In clusters of two the shared operand is
// multicast, half by each CTA.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "fusegen/gemm/config.sm90.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/mainloop/mainloop.sm90.cuh"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// Finds the CTA's tiles for all other warps, running ahead of them. One warp.
template <class Walk>
__device__ void write_tiles(Walk walk, TileRing& ring, uint32_t lane) {
  Cursor<TileRing::kSlots> record;
  Tile tile;
  do {
    tile = walk.next();
    if (lane == 0) ring.write(record, tile);
    __syncwarp();
  } while (tile.group >= 0);
}

// Whether a warpgroup multiplies although the tile has no rows for it. To leave that out is faster
// where groups are small. Where they are large and contractions too deep for operands to stay in the
// L2 cache, the cluster would get ahead of the others of its wave, and either would read from memory
// what they could share: half as much again where that was measured (7168 deep, 16 bits).
template <class T>
__device__ bool stays_in_step(const Tile& tile) {
  constexpr int32_t kLargeGroup = 1024;  // tokens
  constexpr int32_t kDeepBytes = 8192;   // of one row
  constexpr int32_t kElementBytes = kMmaKBytes / T::kMmaK;
  return T::kRaggedRows && !T::kPingpong && tile.rows > 0 && tile.tokens >= kLargeGroup &&
         tile.k >= kDeepBytes / kElementBytes;
}

// Multiplies and stores. One warpgroup, the `part`-th of those that do.
template <Gemm kind, class Element, Store store, class T, class Config, class Operands, class Visits>
__device__ void multiply(const Operands operands, const CUtensorMap* map_d,
                         const Visits visits, uint8_t* stages, uint8_t* buffers,
                         Control<T>& control, const Shape& shape, uint32_t part,
                         uint32_t warp, uint32_t lane) {
  using Stores =
      WarpStores<Element, store, T::kRaggedRows, T::kWaves, Config::tile_n, T::kBuffers>;
  constexpr int kRows = T::kWaves * kMmaRows;
  const int32_t columns = kind == Gemm::fprop ? shape.n : shape.k;
  const int32_t first_row = T::kPingpong ? 0 : int32_t(part) * kRows;
  const int32_t warp_row = first_row + int32_t(warp) * kChunkRows;
  typename Operands::Product contraction{
      {operand_descriptor<T::kMajorA, Config::tile_k>(stages) + (first_row / kMmaRows) * kRowStep,
       operand_descriptor<T::kMajorB, Config::tile_k>(stages + T::kBytesA), control, lane, {}}};
  operands.prepare(contraction, stages, uint32_t(warp_row) + lane / 4);
  const uint32_t math_warp = part * 4 + warp;
  Stores stores{map_d, buffers + math_warp * T::kBuffers * kChunkBytes, control.loaded[math_warp],
                lane};
  Cursor<TileRing::kSlots> record;
  uint32_t turn_phase = part == 0;  // the first turn is the first warpgroup's, without waiting
  bool mine = !T::kPingpong || part == 0;
  for (Tile tile = control.ring.read(record); tile.group >= 0; tile = control.ring.read(record)) {
    if (T::kPingpong && !mine) {
      contraction.at.advance(blocks(tile.k, Config::tile_k));
      mine = true;
      continue;
    }
    mine = !T::kPingpong;
    const int32_t rows = tile.rows - first_row;
    const bool nothing = tile.k == 0 || (rows <= 0 && !stays_in_step<T>(tile));
    stores.start(tile, warp_row, columns);
    const Place place{warp_row, tile.column};
    Accumulators<T::kWaves, Config::tile_n> d;
    const auto fragment = d.fragment(lane);
    auto visitors =
        visits.template begin<std::decay_t<decltype(fragment)>>(tile, place, columns, lane);
    d.clear();
    if constexpr (T::kPingpong) control.turn[part].wait(turn_phase);
    turn_phase ^= 1;
    const auto pass_turn = [&] {
      if (T::kPingpong && lane == 0) control.turn[part ^ 1].arrive();
    };
    if (nothing) {
      contraction.skip(tile.k);
      if (T::kPingpong) __syncwarp();  // all lanes have seen this turn before it is passed on
      pass_turn();
    } else if (T::kWaves == 2 && rows <= kMmaRows) {
      contraction.template run_width<1>(d, tile, columns - tile.column, pass_turn);
    } else {
      contraction.template run_width<T::kWaves>(d, tile, columns - tile.column, pass_turn);
    }
    visitors.visit_whole(fragment, tile, place);
    if (adds(store) && tile.k == 0) continue;
    stores.finish(fragment, tile, warp_row, columns, visitors);
  }
  if (lane == 0) cute::tma_store_wait<0>();
}

// One CTA of a kernel. `Operands` fills the stages, multiplies them and scales the result.
template <Gemm kind, class Element, Store store, class T, class Config, class Operands, class Visits>
__device__ void run_cta(const Operands operands, const CUtensorMap* map_d, const Visits visits,
                        const Shape& shape) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* const stages = shared;
  uint8_t* const buffers = shared + T::kBuffersAt;
  auto& control = *reinterpret_cast<Control<T>*>(shared + T::kControlAt);
  static_assert(sizeof(Control<T>) <= T::kControlBytes);

  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = Config::cluster == 1 ? 0 : blockIdx.x % Config::cluster;
  if (warp == 0 && lane == 0) {
    constexpr int kReadersPerStage = T::kPingpong ? T::kMathWarps / 2 : T::kMathWarps;
    control.stages.init(Config::cluster * kReadersPerStage);
    control.turn[0].init(T::kMathWarps / 2);
    control.turn[1].init(T::kMathWarps / 2);
    control.ring.init(1 + 32 * T::kMathWarps);
    if constexpr (adds(store)) {
      for (auto& barriers : control.loaded) {
        for (CopyBarrier& barrier : barriers) barrier.init(1);
      }
    }
    cutlass::arch::fence_barrier_init();
  }
  if (warp == 1 && lane == 0) {
    operands.prefetch();
    prefetch_descriptor(map_d);
  }
  if constexpr (Config::cluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
  __syncthreads();
  wait_for_previous_kernel();

  const Walker<kind, Config> walker{shape, lane, rank, blockIdx.x / Config::cluster,
                                    gridDim.x / Config::cluster};
  static_assert(T::Source::Order::kScratchBytes <= T::kBufferBytes);
  control.order.template sort<T::kThreads>(walker, buffers);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    if (warp == 0 && lane == 0) {
      operands.load(stages, control, kind == Gemm::fprop ? shape.n : shape.k, rank);
      let_next_kernel_start();
    } else if (warp == 1) {
      write_tiles(typename T::Source(walker, control.order), control.ring, lane);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kMathRegisters>();
    multiply<kind, Element, store, T, Config>(operands, map_d, visits, stages,
                                              buffers, control, shape, warp / 4 - 1, warp % 4,
                                              lane);
  }
  if constexpr (Config::cluster > 1) {
    // A CTA must not leave while its neighbour may still write to it.
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store>
static __global__ void __launch_bounds__(Traits<kind, Element, Config, store>::kThreads, 1)
    ragged_gemm(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_d, const Bias<Element> bias,
                const __grid_constant__ Shape shape) {
  using T = Traits<kind, Element, Config, store>;
  run_cta<kind, Element, store, T, Config>(PlainOperands<kind, T, Config>{&map_a, &map_b}, &map_d,
                                           gemm_visitors<kind, store>(bias, shape), shape);
}

}  // namespace fusegen
