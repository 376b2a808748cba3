// Grouped and dense GEMM for sm_100a, with sums in tensor memory: bf16 or fp16 in and out, or
// operands decoded to bf16, or FP8 codes; weight gradients in fp32 where a module keeps them so.
//
// One persistent kernel serves y = x w^T + bias, dx = dy w and dw = dy^T x (see `Gemm`), over
// groups of tokens whose sizes only the device knows, or over one dense matrix. Warps by role:
//   warp 0      loads operands by TMA (load/tma_loader.sm90.cuh)
//   warp 1      finds tiles
//   warp 2      asks the tensor core for MMAs (mainloop/tensor_sums.sm100.cuh)
//   warps 4..7  visit and store 32 rows each
// Loads, barriers, visitors and sinks are Hopper's: a warp reads tensor memory in strips of 16 rows,
// whose values lie as every MMA of 16 x 8 results leaves them. One accumulator is stored while the
// other one is added to.
//
// A pair of CTAs makes tiles of 256 rows, each CTA 128 of them: warp 2 of the first asks for the MMAs of
// both, which read what either has loaded, and the tensor core tells both when they are done.
#pragma once

#include <cuda_bf16.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "fusegen/fragment/tensor_memory.sm100.cuh"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/config.sm100.cuh"
#include "fusegen/gemm/cta.sm90.cuh"
#include "fusegen/gemm/decoded.cuh"
#include "fusegen/gemm/encoded.sm90.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/result_sink.sm90.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/load/pair_loader.sm100.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/load/tma_loader.sm90.cuh"
#include "fusegen/mainloop/tcgen05.sm100.cuh"
#include "fusegen/mainloop/tensor_sums.sm100.cuh"
#include "fusegen/sink/gated_store.sm90.cuh"
#include "fusegen/sink/store_fragment.cuh"
#include "fusegen/sink/stored.cuh"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// What warps tell each other. `T` are a kernel's traits.
template <class T>
struct Tcgen05Control {
  StageBarriers<T::kStages> stages;
  typename T::Peer peer;
  typename T::Sums sums;
  TileRing ring;
  CopyBarrier loaded[T::kStoringWarps][T::kBuffers];  // where results meet other values
  typename T::Source::Order order;
  uint32_t tensor_memory;  // its address

  // One thread, before any other one touches it.
  __device__ void init() {
    stages.init(1);
    peer.init();
    sums.init(T::kStoringWarps * T::kCluster);
    ring.init(1 + 32 + 32 * T::kStoringWarps);
    if constexpr (loads(T::kStore)) {
      for (auto& barriers : loaded) {
        for (CopyBarrier& barrier : barriers) barrier.init(1);
      }
    }
    fence_barrier_init();
  }
};

// One of the warps that store. `Result` is the type of what is stored.
template <class T, class Result, class Visits, class Change>
struct StoringWarp {
  static constexpr int kRows = 32;
  using Values = TensorFragment<T::kTileN>;

  Visits visits;
  const typename T::Sums& sums;
  int32_t columns;  // of the result
  int32_t row;      // of this warp in a tile
  uint32_t lane;
  uint32_t memory;  // address of its first row
  ResultSink<T, Result, Values, Change> sink;
  Cursor<T::kSums> sum;

  __device__ StoringWarp(const Cta<T, Tcgen05Control>& cta, const Visits& visits,
                         const CUtensorMap* map, const Epilogue<Change, T::kStore>& epilogue,
                         int32_t columns, uint32_t index)
      : visits(visits),
        sums(cta.control().sums),
        columns(columns),
        row(int32_t(index) * kRows),
        lane(cta.lane),
        memory(cta.control().tensor_memory + (index * kRows << 16)),
        sink(ResultSinkOf<T, Result, Values, Change>::make(cta, map, epilogue, columns, row, index)) {}

  __device__ void run(const TileRing& ring) {
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) store(tile);
    sink.drain();
  }

 private:
  // To who adds to the accumulator.
  __device__ void say_empty() const {
    if constexpr (T::kCluster == 1) {
      sums.empty[sum.slot].arrive();
    } else {
      sums.empty[sum.slot].arrive(0u);
    }
  }

  __device__ void store(const Tile& tile) {
    const bool nothing = tile.k == 0;
    const Place place{row, tile.column};
    sink.start(tile, place);
    auto visitors = visits.template begin<Values>(tile, place, columns, lane);
    if (!nothing) {
      sums.full[sum.slot].wait(sum.phase);
      tcgen05::fence_after_sync();
    }
    float registers[2][32];
    const Values values{memory + sums.column(sum.slot), lane, nothing, registers};
    if constexpr (is_gated(T::kStore)) {
      store_halves(values, visitors, sink, tile, row, columns / 2);
    } else if (!(adds(T::kStore) && nothing)) {
      store_fragment(values, visitors, sink, tile, place, columns);
    }
    if (nothing) return;
    tcgen05::fence_before_sync();
    __syncwarp();
    if (lane == 0) say_empty();
    sum.advance();
  }
};

// Tiles as one CTA of a pair has them: 128 rows. One without a row of its own loads what B needs, and
// the scales of rows that there are.
template <class T, class Source>
struct HalvesOf {
  Source source;
  uint32_t rank;

  __device__ Tile next() {
    Tile tile = source.next();
    if (T::kCluster == 1 || rank == 0) return tile;
    const int32_t below = tile.rows - T::kTileM;
    tile.row += below > 0 ? T::kTileM : 0;
    tile.rows = max(below, 0);
    return tile;
  }
};

// One CTA of a kernel with traits `T`: `loader` fills the stages, `visits` change the sums, which
// are rounded to `Result`, go through `epilogue` and are stored through `map_d`.
template <class T, class Result, class Loader, class Visits, class Change>
__device__ void run_tcgen05_cta(const Loader& loader, const Visits& visits,
                                const CUtensorMap* map_d,
                                const Epilogue<Change, T::kStore>& epilogue, const Shape& shape) {
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr uint32_t kAsking = 2, kStoring = 4;  // warps
  const Cta<T, Tcgen05Control> cta(shared);
  Tcgen05Control<T>& control = cta.control();
  if (cta.warp == 0 && cta.lane == 0) control.init();
  if (cta.warp == 1 && cta.lane == 0) {
    loader.prefetch();
    prefetch_descriptor(map_d);
    epilogue.prefetch();
  }
  if (cta.warp == kAsking) {
    tcgen05::allocate<T::kTensorColumns, T::kCluster>(&control.tensor_memory);
  }
  tcgen05::fence_before_sync();
  cta.enter();
  tcgen05::fence_after_sync();
  wait_for_previous_kernel();

  const typename T::Walk walk = cta.walk(shape);
  static_assert(T::Source::Order::kScratchBytes <= T::kBufferBytes);
  control.order.template sort<T::kThreads>(walk, cta.buffers());
  const int32_t columns = T::kKind == Gemm::fprop ? shape.n : shape.k;
  if (cta.warp == 0 && cta.lane == 0) {
    // Of a gated result both halves of every tile are loaded, whatever there is of them.
    const int32_t loaded = is_gated(T::kStore) ? INT32_MAX : columns;
    loader.run(cta.shared, control.stages, control.ring, loaded, cta.rank);
    let_next_kernel_start();
  } else if (cta.warp == 1) {
    using Halves = HalvesOf<T, typename T::Source>;
    write_tiles(Halves{{walk, control.order}, cta.rank}, control.ring, cta.lane);
  } else if (cta.warp == kAsking) {
    TensorSums<T> asks(cta.shared, control.stages, control.peer, control.sums,
                       control.tensor_memory);
    if constexpr (T::kCluster > 1) {
      if (cta.rank > 0) asks.tell_first(control.ring);
    }
    if (cta.rank == 0) asks.run(control.ring);
  } else if (cta.warp >= kStoring) {
    StoringWarp<T, Result, Visits, Change>(cta, visits, map_d, epilogue, columns,
                                           cta.warp - kStoring)
        .run(control.ring);
  }
  __syncwarp();
  tcgen05::fence_before_sync();
  __syncthreads();
  cta.leave();
  tcgen05::fence_after_sync();
  if (cta.warp == kAsking) {
    tcgen05::deallocate<T::kTensorColumns, T::kCluster>(control.tensor_memory);
  }
}

template <class T, class Extras = NoExtras>
using Tcgen05Loader =
    std::conditional_t<T::kCluster == 1, TmaLoader<T, typename T::Coordinates, Extras>,
                       PairLoader<T, typename T::Coordinates, Extras>>;

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store, class Change>
static __global__ void __launch_bounds__(Tcgen05Traits<kind, Element, Config, store>::kThreads, 1)
    ragged_tcgen05_gemm(const __grid_constant__ CUtensorMap map_a,
                        const __grid_constant__ CUtensorMap map_b,
                        const __grid_constant__ CUtensorMap map_d, const Bias<Element> bias,
                        const __grid_constant__ Epilogue<Change, store> epilogue,
                        const __grid_constant__ Shape shape) {
  using T = Tcgen05Traits<kind, Element, Config, store>;
  run_tcgen05_cta<T, Stored<Element, store>>(Tcgen05Loader<T>{&map_a, &map_b, {}},
                                             gemm_visitors<kind, store>(bias, shape), &map_d,
                                             epilogue, shape);
}

template <Gemm kind, class Element, class Config, Store store, class Scales, class Change>
static __global__ void __launch_bounds__(
    Tcgen05Traits<kind, __nv_bfloat16, Config, store>::kThreads, 1)
    ragged_decoded_tcgen05_gemm(const __grid_constant__ CUtensorMap map_a,
                                const __grid_constant__ CUtensorMap map_b,
                                const __grid_constant__ CUtensorMap map_d, const Scales scales,
                                const Bias<Element> bias,
                                const __grid_constant__ Epilogue<Change, store> epilogue,
                                const __grid_constant__ Shape shape) {
  using T = Tcgen05Traits<kind, __nv_bfloat16, Config, store>;
  run_tcgen05_cta<T, Stored<Element, store>>(Tcgen05Loader<T>{&map_a, &map_b, {}},
                                             gemm_visitors<kind, store>(bias, shape, scales),
                                             &map_d, epilogue, shape);
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class Element, class Config, Store store = Store::io, class Change = Keep>
static Status launch_tcgen05_gemm(const GemmArguments& in, Stream& stream,
                                  const Change& change = {}) {
  using T = Tcgen05Traits<kind, Element, Config, store>;
  if (Status status = check_arguments(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (in.tokens == 0) return multiply_nothing<kind, Result, store>(in, stream);
  Encoded<Change, store> told(change);
  if (Status status = encode<kind, Element, Element, T>(in, &told); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Bias<Element>,
                    Epilogue<Change, store>>(
      &ragged_tcgen05_gemm<kind, Element, Config, store, Change>, shared_memory_allowed, in,
      stream, told.a, told.b, told.d, bias_of<Element>(in), told.epilogue);
}

template <Gemm kind, class Element, class Config, Store store = Store::io,
          EndScale of_a = EndScale::none, EndScale of_b = EndScale::none, class Change = Keep>
static Status launch_decoded_tcgen05_gemm(const DecodedGemmArguments& in, Stream& stream,
                                          const Change& change = {}) {
  using T = Tcgen05Traits<kind, __nv_bfloat16, Config, store>;
  const GemmArguments& gemm = in.gemm;
  if (Status status = check_arguments<of_a, of_b>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  Encoded<Change, store> told(change);
  if (Status status = encode<kind, __nv_bfloat16, Element, T>(gemm, &told); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  auto scales = end_scales<kind, of_a, of_b>(in);
  using Scales = decltype(scales);
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Scales, Bias<Element>,
                    Epilogue<Change, store>>(
      &ragged_decoded_tcgen05_gemm<kind, Element, Config, store, Scales, Change>,
      shared_memory_allowed, gemm, stream, told.a, told.b, told.d, scales,
      bias_of<Element>(gemm), told.epilogue);
}

}  // namespace fusegen
