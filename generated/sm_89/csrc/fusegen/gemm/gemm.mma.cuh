// Grouped and dense GEMM by mma.sync, for sm_80 and later: bf16 or fp16 in and out, or operands
// decoded to bf16; fp32 accumulation; weight gradients in fp32 where a module keeps them so.
//
// One persistent kernel serves y = x w^T + bias, dx = dy w and dw = dy^T x (see `Gemm`), over
// groups of tokens whose sizes only the device knows, or over one dense matrix. All warps do the
// same: each finds the CTA's tiles by itself (tile_source/), copies its share of both operands
// (load/cp_async.mma.cuh), multiplies its part of the tile (mainloop/mma.mma.cuh) and stores that
// (sink/plain.cuh, sink/plain_gated.cuh). A tile's first stages are on their way before the results of the one before it
// are stored, and no barrier stands between two tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/gemm/decoded.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/load/cp_async.mma.cuh"
#include "fusegen/mainloop/mma.mma.cuh"
#include "fusegen/sink/plain.cuh"
#include "fusegen/sink/plain_gated.cuh"
#include "fusegen/sink/store_fragment.cuh"
#include "fusegen/tile_source/tile_source.cuh"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// The tensors that results are written to, and what they go through on the way there.
template <class Change>
struct MmaResult {
  void* d;
  const void* other;  // what `change` loads, or its values of rows
  void* aux;          // for results before it; nullptr: nobody asks
  Change change;
};

template <class Element, Store store, bool Ragged, class Values, class Change>
struct MmaSinkOf {
  using Type = PlainSink<Element, store, Ragged, Values::kColumns, Change>;
};
template <class Element, class Values, class Change>
struct MmaSinkOf<Element, Store::gated, true, Values, Change> {
  using Type = PlainGatedSink<Element, Values, Change>;
};
template <class Element, class Values, class Change>
struct MmaSinkOf<Element, Store::gated_aux, true, Values, Change> {
  using Type = PlainGatedSink<Element, Values, Change>;
};
template <class Element, Store store, bool Ragged, class Values, class Change>
using MmaSink = typename MmaSinkOf<Element, store, Ragged, Values, Change>::Type;

// One CTA of a kernel.
template <Gemm kind, class Element, Store store, class T, class Config, class Visits, class Change>
__device__ void run_mma_cta(const typename T::Operands& in, const MmaResult<Change>& result,
                            const Visits visits, const Shape& shape,
                            const typename T::WarpSums& add_up = {}) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Mainloop = MmaMainloop<kind, Config, T>;
  using Values = Fragment<T::kWarpColumns, Mainloop::kRowBlocks>;
  using Sink = MmaSink<Element, store, kind != Gemm::wgrad, Values, Change>;
  static_assert(Change::kLoads == loads(store));
  auto& control = *reinterpret_cast<MmaControl<kind, Config>*>(shared + T::kControlAt);

  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x % 32;
  const int32_t columns = kind == Gemm::fprop ? shape.n : shape.k;
  const uint32_t stages = uint32_t(__cvta_generic_to_shared(shared));
  const int32_t warp_row = int32_t(warp / Config::warps_n) * T::kWarpRows;
  const int32_t warp_column = int32_t(warp % Config::warps_n) * T::kWarpColumns;
  wait_for_previous_kernel();

  const Walker<kind, Config> walker{shape, lane, 0, blockIdx.x, gridDim.x};
  control.order.template sort<T::kThreads>(walker, shared);
  typename T::Source source(walker, control.order);
  CopyRing<kind, Config, T> copies(in, shape, stages);
  Mainloop mainloop(stages, uint32_t(warp_row), uint32_t(warp_column), lane);
  Sink sink(result.d, shared + T::kSlabsAt + warp * kSlabBytes, shape.n, columns, lane,
            result.other, result.aux, result.change);

  // Tiles wait in shared memory: registers are for sums and operands.
  Tile(&tiles)[2] = control.tiles[warp];
  const auto find_tile = [&](Tile& to) {
    const Tile found = source.next();
    __syncwarp();  // all lanes have read what was there
    if (lane == 0) to = found;
    __syncwarp();
    if (found.group < 0) let_next_kernel_start();
  };
  find_tile(tiles[0]);
  copies.enter(tiles[0]);
  for (int i = 0; i < T::kStages - 1; ++i) copies.copy_if_any();
  for (int slot = 0; tiles[slot].group >= 0; slot ^= 1) {
    const Tile& tile = tiles[slot];
    find_tile(tiles[slot ^ 1]);
    const Place place{warp_row, tile.column + warp_column};
    typename Mainloop::Accumulators totals = {};
    const Values fragment{totals, lane};
    auto visitors = visits.template begin<Values>(tile, place, columns, lane);
    auto sums = add_up.template begin<Config>(fragment, tile, place, columns);
    const bool exists = warp_row < tile.rows && place.column < columns;
    sink.start(tile, place);
    mainloop.run(sums, tile, tiles[slot ^ 1], copies, exists);
    if (!exists || (adds(store) && tile.k == 0)) continue;
    if constexpr (is_gated(store)) {
      const Place of_half{place.row, place.column / 2};
      store_warp_halves(fragment, visitors, sink, tile, of_half, columns / 2);
    } else {
      store_fragment(fragment, visitors, sink, tile, place, columns);
    }
  }
  sink.drain();
}

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store, class Change>
static __global__ void __launch_bounds__(MmaTraits<kind, Element, Config, store>::kThreads,
                                         Config::ctas)
    ragged_mma_gemm(const MmaOperands in, const __grid_constant__ MmaResult<Change> result,
                    const Bias<Element> bias, const __grid_constant__ Shape shape) {
  using T = MmaTraits<kind, Element, Config, store>;
  run_mma_cta<kind, Element, store, T, Config>(in, result, gemm_visitors<kind, store>(bias, shape),
                                               shape);
}

template <Gemm kind, class Element, class Config, Store store, class Scales, class Change>
static __global__ void __launch_bounds__(MmaTraits<kind, __nv_bfloat16, Config, store>::kThreads,
                                         Config::ctas)
    ragged_decoded_mma_gemm(const MmaOperands in, const __grid_constant__ MmaResult<Change> result,
                            const Scales scales, const Bias<Element> bias,
                            const __grid_constant__ Shape shape) {
  using T = MmaTraits<kind, __nv_bfloat16, Config, store>;
  run_mma_cta<kind, Element, store, T, Config>(
      in, result, gemm_visitors<kind, store>(bias, shape, scales), shape);
}

template <Gemm kind>
MmaOperands mma_operands(const GemmArguments& in) {
  const int64_t pitch_a = 2 * (kind == Gemm::fprop ? in.k : in.n);
  return {static_cast<const uint8_t*>(in.a), static_cast<const uint8_t*>(in.b), uint32_t(pitch_a),
          uint32_t(2 * in.k)};
}

// Gradients of weights that are added to something meet that.
template <class Element, Store store, class Change>
auto mma_result(const GemmArguments& in, const Change& change) {
  if constexpr (adds(store)) {
    return MmaResult<Add<Stored<Element, store>>>{in.d, in.d, nullptr, {}};
  } else {
    return MmaResult<Change>{in.d, in.epilogue.other, in.epilogue.aux, change};
  }
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class Element, class Config, Store store = Store::io, class Change = Keep>
static Status launch_mma_gemm(const GemmArguments& in, Stream& stream, const Change& change = {}) {
  using T = MmaTraits<kind, Element, Config, store>;
  if (Status status = check_arguments(in); !status.ok()) return status;
  if (is_gated(store) && in.n % (2 * kRowAlignment) != 0) {
    return {static_cast<int>(cudaErrorInvalidValue), "gated n: a multiple of 16"};
  }
  using Result = Stored<Element, store>;
  if (in.tokens == 0) return multiply_nothing<kind, Result, store>(in, stream);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  const auto result = mma_result<Element, store>(in, change);
  using Changed = decltype(result.change);
  return launch_cta<kind, T, Config, MmaOperands, MmaResult<Changed>, Bias<Element>>(
      &ragged_mma_gemm<kind, Element, Config, store, Changed>, shared_memory_allowed, in, stream,
      mma_operands<kind>(in), result, bias_of<Element>(in));
}

template <Gemm kind, class Element, class Config, Store store = Store::io,
          EndScale of_a = EndScale::none, EndScale of_b = EndScale::none, class Change = Keep>
static Status launch_decoded_mma_gemm(const DecodedGemmArguments& in, Stream& stream,
                                      const Change& change = {}) {
  using T = MmaTraits<kind, __nv_bfloat16, Config, store>;
  if (Status status = check_arguments<of_a, of_b>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  const GemmArguments& gemm = in.gemm;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  auto scales = end_scales<kind, of_a, of_b>(in);
  using Scales = decltype(scales);
  const auto result = mma_result<Element, store>(gemm, change);
  using Changed = decltype(result.change);
  return launch_cta<kind, T, Config, MmaOperands, MmaResult<Changed>, Scales, Bias<Element>>(
      &ragged_decoded_mma_gemm<kind, Element, Config, store, Scales, Changed>,
      shared_memory_allowed, gemm, stream, mma_operands<kind>(gemm), result, scales,
      bias_of<Element>(gemm));
}

}  // namespace fusegen
