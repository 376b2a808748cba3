// Grouped and dense GEMM for sm_90a: bf16 or fp16 in and out, fp32 accumulation.
//
// One persistent kernel serves y = x w^T + bias, dx = dy w and dw = dy^T x (see `Gemm`), over
// groups of tokens whose sizes only the device knows, or over one dense matrix. Warps by role:
//   warpgroup 0     warp 0 loads operands by TMA, warp 1 finds tiles (schedule.cuh)
//   warpgroups 1, 2 multiply and store (mma_sm90.cuh, epilogue.cuh)
// Cooperative: both math warpgroups work on one tile, half of its rows each, and never wait for
// each other, so that one's epilogue overlaps the other's MMAs. Pingpong: each owns every second
// tile, in turns, which hides whole epilogues where contractions are short.
// Operands wait in a ring of stages (pipeline.cuh). In clusters of two the shared operand is
// multicast, half by each CTA.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "epilogue.cuh"
#include "gemm.h"
#include "mma_sm90.cuh"
#include "pipeline.cuh"
#include "ragged.cuh"
#include "schedule.cuh"
#include "status.cuh"

namespace fusegen {

enum class Schedule { cooperative, pingpong };

// Names one kernel: tile, cluster size, schedule, least number of store buffers per warp.
template <int M, int N, int K, int Cluster, Schedule schedule_, int Buffers = 2>
struct Config {
  static constexpr int tile_m = M;
  static constexpr int tile_n = N;
  static constexpr int tile_k = K;
  static constexpr int cluster = Cluster;
  static constexpr int buffers = Buffers;
  static constexpr Schedule schedule = schedule_;
};

template <Gemm kind, class Element, class Config>
struct Traits {
  static constexpr int kThreads = 384;
  static constexpr int kMathWarps = 8;
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMathRegisters = 232;
  static constexpr int kSharedBytes = 232448;  // most that one CTA of sm_90 may have

  static constexpr bool kPingpong = Config::schedule == Schedule::pingpong;
  static constexpr bool kRaggedRows = kind != Gemm::wgrad;
  static constexpr Major kMajorA = kind == Gemm::wgrad ? Major::MN : Major::K;
  static constexpr Major kMajorB = kind == Gemm::fprop ? Major::K : Major::MN;
  static constexpr int kRankA = kind == Gemm::wgrad ? 4 : 2;
  static constexpr int kRankB = kind == Gemm::wgrad ? 4 : 3;
  static constexpr int kWaves = Config::tile_m / kMmaRows / (kPingpong ? 1 : 2);

  // Boxes: 64 rows of A each, so that missing rows are not loaded and halves can be shared.
  static constexpr int kBoxesA = Config::tile_m / 64;
  static constexpr int kBoxesB = kMajorB == Major::MN ? Config::tile_n / 64 : 2;
  static constexpr int kBoxWidthB = Config::tile_n / kBoxesB;
  static constexpr int kBoxBytesA = 64 * Config::tile_k * 2;
  static constexpr int kBoxBytesB = kBoxWidthB * Config::tile_k * 2;
  static constexpr int kBytesA = kBoxesA * kBoxBytesA;
  static constexpr int kBytesB = kBoxesB * kBoxBytesB;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  static constexpr int kControlBytes = 2048;  // barriers, tile records, order of groups
  static constexpr int kBufferBytes = kMathWarps * kChunkBytes;  // one buffer of every warp
  static constexpr int kStages =
      (kSharedBytes - kControlBytes - Config::buffers * kBufferBytes) / kStageBytes;
  static constexpr int kSpare = kSharedBytes - kControlBytes - kStages * kStageBytes;
  static constexpr int kChunks = kWaves * Config::tile_n / kChunkColumns;
  static constexpr int kBuffers =
      kSpare / kBufferBytes < kChunks ? kSpare / kBufferBytes : kChunks;
  static constexpr int kUsedBytes = kStages * kStageBytes + kBuffers * kBufferBytes + kControlBytes;

  static_assert(Config::tile_k == kSwizzleElements, "a K-major box is one swizzle atom wide");
  static_assert(kWaves == 1 || kWaves == 2);
  static_assert(kWaves * Config::tile_n <= 384, "accumulators beyond 192 registers");
  static_assert(Config::cluster == 1 || Config::cluster == 2);
  static_assert(kStages >= 3 && kBuffers >= 1);
  static_assert(kBoxBytesA % 1024 == 0 && kBoxBytesB % 1024 == 0, "swizzle atoms are 1024 bytes");
};

template <class Traits, class Config>
struct Control {
  StageBarriers<Traits::kStages> stages;
  Barrier turn[2];
  TileRing ring;
  uint16_t order[DepthWalk<Config>::kSortedGroups];
};

__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int Rank>
__device__ void load_box(const CUtensorMap* map, CopyBarrier& barrier, void* to, BoxCoordinates at,
                         bool multicast) {
  constexpr uint16_t kBothCtas = 3;
  constexpr uint64_t kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  auto* bar = reinterpret_cast<uint64_t*>(&barrier);
  using Load = cute::SM90_TMA_LOAD;
  using Multicast = cute::SM90_TMA_LOAD_MULTICAST;
  if constexpr (Rank == 2) {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y);
    Load::copy(map, bar, kHint, to, at.x, at.y);
  } else if constexpr (Rank == 3) {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y, at.z);
    Load::copy(map, bar, kHint, to, at.x, at.y, at.z);
  } else {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y, at.z, at.w);
    Load::copy(map, bar, kHint, to, at.x, at.y, at.z, at.w);
  }
}

template <Gemm kind>
__device__ BoxCoordinates coordinates_a(const Tile& tile, int32_t row, int32_t depth) {
  if constexpr (kind == Gemm::wgrad) return ragged_coordinates(row, tile.begin, tile.tokens, depth);
  return {depth, tile.begin + row, 0, 0};
}

template <Gemm kind>
__device__ BoxCoordinates coordinates_b(const Tile& tile, int32_t column, int32_t depth) {
  if constexpr (kind == Gemm::wgrad) {
    return ragged_coordinates(column, tile.begin, tile.tokens, depth);
  }
  if constexpr (kind == Gemm::dgrad) return {column, depth, tile.group, 0};
  return {depth, column, tile.group, 0};
}

// The boxes of one operand that exist; a shared operand's boxes alternate between the two CTAs.
__device__ inline int existing_boxes(int32_t extent, int width, int boxes) {
  return extent <= 0 ? 0 : min(int(blocks(extent, width)), boxes);
}

// Loads every stage of every tile. One thread.
template <Gemm kind, class T, class Config>
__device__ void load_operands(const CUtensorMap* map_a, const CUtensorMap* map_b,
                              uint8_t* stages, Control<T, Config>& control, int32_t columns,
                              uint32_t rank) {
  Cursor<T::kStages> at;
  Cursor<TileRing::kDepth> record;
  for (Tile tile = control.ring.read(record); tile.group >= 0; tile = control.ring.read(record)) {
    const int boxes_a = existing_boxes(tile.rows, 64, T::kBoxesA);
    const int boxes_b = existing_boxes(columns - tile.column, T::kBoxWidthB, T::kBoxesB);
    const uint32_t bytes = boxes_a * T::kBoxBytesA + boxes_b * T::kBoxBytesB;
    const bool share_a = tile.share == Share::a;
    const bool share_b = tile.share == Share::b;
    for (int32_t depth = 0; depth < tile.depth; depth += Config::tile_k) {
      control.stages.empty[at.slot].wait(at.phase ^ 1);
      CopyBarrier& full = control.stages.full[at.slot];
      full.arrive_and_expect_tx(bytes);
      uint8_t* const stage = stages + at.slot * T::kStageBytes;
#pragma unroll
      for (int box = 0; box < T::kBoxesA; ++box) {
        if (box >= boxes_a || (share_a && box % 2 != rank)) continue;
        load_box<T::kRankA>(map_a, full, stage + box * T::kBoxBytesA,
                            coordinates_a<kind>(tile, tile.row + box * 64, depth), share_a);
      }
#pragma unroll
      for (int box = 0; box < T::kBoxesB; ++box) {
        if (box >= boxes_b || (share_b && box % 2 != rank)) continue;
        load_box<T::kRankB>(
            map_b, full, stage + T::kBytesA + box * T::kBoxBytesB,
            coordinates_b<kind>(tile, tile.column + box * T::kBoxWidthB, depth), share_b);
      }
      at.advance();
    }
  }
}

// The contraction of one tile by one warpgroup. Keeps one batch of MMAs in flight, so a stage is
// released one step after its MMAs were issued.
template <Gemm kind, class Element, class T, class Config>
struct Contraction {
  using Mma = WarpgroupMma<Element, T::kMajorA, T::kMajorB>;
  static constexpr int kSteps = Config::tile_k / kMmaDepth;

  uint64_t a, b;  // descriptors of this warpgroup's operands in stage 0
  Control<T, Config>& control;
  uint32_t lane;
  Cursor<T::kStages> at;
  uint32_t previous = 0;  // stage of the batch in flight
  bool in_flight = false;

  __device__ uint64_t stage_offset() const { return at.slot * (T::kStageBytes / 16); }

  template <int Used, int Width>
  __device__ void issue(Accumulators<T::kWaves, Config::tile_n>& d, int step) {
    Mma::template step<Used, Width>(d, a + stage_offset() + step * kDepthStep<T::kMajorA>,
                             b + stage_offset() + step * kDepthStep<T::kMajorB>);
  }

  __device__ void release(uint32_t slot) {
    control.stages.template release<Config::cluster>(slot, lane);
  }

  // A warpgroup without rows of its own still takes part in every stage's handshake.
  __device__ void skip(int32_t depth) {
    for (; depth > 0; depth -= Config::tile_k) {
      control.stages.full[at.slot].wait(at.phase);
      __syncwarp();
      release(at.slot);
      at.advance();
    }
  }

  // One stage, or the first `Steps` k16 steps of it. Returns with its MMAs in flight and the stage
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
  __device__ void run(Accumulators<T::kWaves, Config::tile_n>& d, int32_t depth, Issued issued) {
    static_assert(kSteps == 4);
    const int last_steps = kind == Gemm::wgrad ? blocks(depth, kMmaDepth) % kSteps : 0;
    const int whole = int(blocks(depth, Config::tile_k)) - (last_steps > 0);
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
  __device__ void run_width(Accumulators<T::kWaves, Config::tile_n>& d, int32_t depth,
                            int32_t width, Issued issued) {
    if (Config::tile_n > 64 && width <= 64) {
      run<Used, Config::tile_n < 64 ? Config::tile_n : 64>(d, depth, issued);
    } else if (Config::tile_n > 128 && width <= 128) {
      run<Used, Config::tile_n < 128 ? Config::tile_n : 128>(d, depth, issued);
    } else {
      run<Used, Config::tile_n>(d, depth, issued);
    }
  }
};

// Finds the CTA's tiles for all other warps, running ahead of them. One warp.
template <class Walk>
__device__ void write_tiles(Walk walk, TileRing& ring, uint32_t lane) {
  Cursor<TileRing::kDepth> record;
  Tile tile;
  do {
    tile = walk.next();
    if (lane == 0) ring.write(record, tile);
    __syncwarp();
  } while (tile.group >= 0);
}

// Multiplies and stores. One warpgroup; `half` is 0 or 1.
template <Gemm kind, class Element, class T, class Config>
__device__ void multiply(const CUtensorMap* map_d, const Element* bias, uint8_t* stages,
                         uint32_t buffers, Control<T, Config>& control, const Shape& shape,
                         uint32_t half, uint32_t warp, uint32_t lane) {
  constexpr int kRows = T::kWaves * kMmaRows;
  const int32_t columns = kind == Gemm::fprop ? shape.n : shape.k;
  const int32_t first_row = T::kPingpong ? 0 : int32_t(half) * kRows;
  Contraction<kind, Element, T, Config> contraction{
      operand_descriptor<T::kMajorA, Config::tile_k>(stages) + (first_row / kMmaRows) * kRowStep,
      operand_descriptor<T::kMajorB, Config::tile_k>(stages + T::kBytesA), control, lane, {}};
  StoreRing<T::kBuffers> store{buffers + (half * 4 + warp) * T::kBuffers * kChunkBytes};
  Cursor<TileRing::kDepth> record;
  uint32_t turn_phase = half == 0;  // the first turn is the first warpgroup's, without waiting
  bool mine = !T::kPingpong || half == 0;
  for (Tile tile = control.ring.read(record, lane); tile.group >= 0;
       tile = control.ring.read(record, lane)) {
    if (T::kPingpong && !mine) {
      contraction.at.advance(blocks(tile.depth, Config::tile_k));
      mine = true;
      continue;
    }
    mine = !T::kPingpong;
    const int32_t rows = tile.rows - first_row;
    Accumulators<T::kWaves, Config::tile_n> d;
    d.clear();
    if constexpr (T::kPingpong) control.turn[half].wait(turn_phase);
    turn_phase ^= 1;
    const auto pass_turn = [&] {
      if (T::kPingpong && lane == 0) control.turn[half ^ 1].arrive();
    };
    if (tile.depth == 0 || rows <= 0) {
      contraction.skip(tile.depth);
      pass_turn();
    } else if (T::kWaves == 2 && rows <= kMmaRows) {
      contraction.template run_width<1>(d, tile.depth, columns - tile.column, pass_turn);
    } else {
      contraction.template run_width<T::kWaves>(d, tile.depth, columns - tile.column,
                                                    pass_turn);
    }
    const Element* group_bias =
        kind == Gemm::fprop && bias != nullptr && tile.group < shape.groups
            ? bias + int64_t(tile.group) * shape.n : nullptr;
#pragma unroll
    for (int wave = 0; wave < T::kWaves; ++wave) {
      store_wave<Element, T::kRaggedRows, Config::tile_n>(
          d.values[wave], store, map_d, tile,
          int32_t(first_row + wave * kMmaRows + warp * kChunkRows), columns, group_bias, lane);
    }
  }
  if (lane == 0) cute::tma_store_wait<0>();
}

template <Gemm kind, class Element, class Config>
static __global__ void __launch_bounds__(Traits<kind, Element, Config>::kThreads, 1)
    ragged_gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_d, const Element* bias,
                const __grid_constant__ Shape shape) {
  using T = Traits<kind, Element, Config>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* const stages = shared;
  uint8_t* const buffers = shared + T::kStages * T::kStageBytes;
  auto& control = *reinterpret_cast<Control<T, Config>*>(buffers + T::kBuffers * T::kBufferBytes);
  static_assert(sizeof(Control<T, Config>) <= T::kControlBytes);

  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t rank = Config::cluster == 1 ? 0 : blockIdx.x % Config::cluster;
  if (warp == 0 && lane == 0) {
    constexpr int kReadersPerStage = T::kPingpong ? T::kMathWarps / 2 : T::kMathWarps;
    control.stages.init(Config::cluster * kReadersPerStage);
    control.turn[0].init(T::kMathWarps / 2);
    control.turn[1].init(T::kMathWarps / 2);
    control.ring.init(1 + T::kMathWarps);
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Config::cluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
  __syncthreads();
  wait_for_previous_kernel();

  const Walker<kind, Config> walker{shape, lane, rank, blockIdx.x / Config::cluster,
                                    gridDim.x / Config::cluster};
  if constexpr (kind == Gemm::wgrad) {
    static_assert(DepthWalk<Config>::kSortedGroups * sizeof(uint32_t) <= T::kBufferBytes);
    DepthWalk<Config>::template sort<T::kThreads>(walker, reinterpret_cast<uint32_t*>(buffers),
                                                  control.order);
  }
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    if (warp == 0 && lane == 0) {
      load_operands<kind, T, Config>(&map_a, &map_b, stages, control,
                                     kind == Gemm::fprop ? shape.n : shape.k, rank);
      let_next_kernel_start();
    } else if (warp == 1) {
      if constexpr (kind == Gemm::wgrad) {
        write_tiles(DepthWalk<Config>(walker, control.order), control.ring, lane);
      } else {
        write_tiles(RowWalk<kind, Config>(walker), control.ring, lane);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kMathRegisters>();
    multiply<kind, Element, T, Config>(&map_d, bias, stages, cute::cast_smem_ptr_to_uint(buffers),
                                       control, shape, warp / 4 - 1, warp % 4, lane);
  }
  if constexpr (Config::cluster > 1) {
    // A CTA must not leave while its neighbour may still write to it.
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

}  // namespace fusegen

#include "launch_sm90.cuh"
