// Grouped and dense GEMM for sm_90a: bf16 or fp16 in and out, fp32 accumulation; weight gradients
// in fp32 where a module keeps them so.
//
// One persistent kernel serves y = x w^T + bias, dx = dy w and dw = dy^T x (see `Gemm`), over
// groups of tokens whose sizes only the device knows, or over one dense matrix. Warps by role:
//   warpgroup 0     warp 0 loads operands by TMA, warp 1 finds tiles, warps 2 and 3 gather rows
//   the others      multiply, visit and store (gemm/math_warps.sm90.cuh)
// Cooperative: two or three math warpgroups work on one tile, an equal part of its rows each, and
// never wait for each other, so that one's epilogue overlaps the others' MMAs. Pingpong: each of
// two owns every second tile, in turns, which hides whole epilogues where contractions are short.
// Operands wait in a ring of stages (load/ring.sm90.cuh). In clusters of two the shared operand is
// multicast, half by each CTA.
#pragma once


#include <cstdint>

#include "fusegen/gemm/config.sm90.cuh"
#include "fusegen/gemm/cta.sm90.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/math_warps.sm90.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/load/tma_loader.sm90.cuh"
#include "fusegen/mainloop/running_sums.sm90.cuh"
#include "fusegen/sink/stored.cuh"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// Of a kernel that gathers nothing.
struct NothingGathered {
  template <class T>
  __device__ typename T::Source source(const typename T::Walk& walk, const Control<T>& control) const {
    return {walk, control.order};
  }

  template <class T>
  __device__ void run(uint8_t*, Control<T>&, uint32_t, uint32_t) const {}
};

// Columns of the result whose operands are loaded: where they are gated, both halves of every tile.
template <class T>
__device__ int32_t loaded_columns(int32_t columns) {
  return is_gated(T::kStore) ? int32_t(blocks(columns, T::kTileN)) * T::kTileN : columns;
}

// The first warpgroup.
template <class T, class Loader, class Gathered>
__device__ void load_and_find(const Cta<T>& cta, const Loader& loader,
                              const typename T::Walk& walk, int32_t columns,
                              const Gathered& gathered) {
  Control<T>& control = cta.control();
  if (cta.warp == 0 && cta.lane == 0) {
    loader.run(cta.shared, control.stages, control.ring, columns, cta.rank);
    let_next_kernel_start();
  } else if (cta.warp == 1) {
    write_tiles(gathered.template source<T>(walk, control), control.ring, cta.lane);
  } else if (cta.warp >= 2) {
    gathered.template run<T>(cta.shared, control, cta.warp - 2, cta.lane);
  }
}

// One CTA of a kernel with traits `T`: `loader` fills the stages, `Mainloop` multiplies them,
// `visits` change the sums, which are rounded to `Result`, go through `epilogue` and are stored
// through `map_d`. Where an operand is gathered, `gathered` fills the stages with it.
template <class T, class Result, class Mainloop, class Loader, class Visits, class Change,
          class Gathered = NothingGathered>
__device__ void run_cta(const Loader& loader, typename Mainloop::Arguments arguments,
                        const Visits& visits, const CUtensorMap* map_d,
                        const Epilogue<Change, T::kStore>& epilogue, const Shape& shape,
                        const Gathered& gathered = {}) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta<T> cta(shared);
  if (cta.warp == 0 && cta.lane == 0) cta.control().init();
  if (cta.warp == 1 && cta.lane == 0) {
    loader.prefetch();
    prefetch_descriptor(map_d);
    epilogue.prefetch();
  }
  cta.enter();
  wait_for_previous_kernel();

  const typename T::Walk walk = cta.walk(shape);
  static_assert(T::Source::Order::kScratchBytes <= T::kBufferBytes);
  cta.control().order.template sort<T::kThreads>(walk, cta.buffers());
  const int32_t columns = T::kKind == Gemm::fprop ? shape.n : shape.k;
  if (cta.warp < 4) {
    lower_registers<T::kLoaderRegisters>();
    load_and_find(cta, loader, walk, loaded_columns<T>(columns), gathered);
  } else {
    raise_registers<T::kMathRegisters>();
    MathWarp<T, Result, Mainloop, Visits, Change>(cta, arguments, visits, map_d, epilogue, columns,
                                                  cta.warp / 4 - 1, cta.warp % 4)
        .run(cta.control().ring);
  }
  cta.leave();
}

template <class T>
using PlainLoader = TmaLoader<T, typename T::Coordinates, NoExtras>;

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store, class Change>
static __global__ void __launch_bounds__(Traits<kind, Element, Config, store>::kThreads, 1)
    ragged_gemm(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b,
                const __grid_constant__ CUtensorMap map_d, const Bias<Element> bias,
                const __grid_constant__ Epilogue<Change, store> epilogue,
                const __grid_constant__ Shape shape) {
  using T = Traits<kind, Element, Config, store>;
  const PlainLoader<T> loader{&map_a, &map_b, {}};
  run_cta<T, Stored<Element, store>, RunningSums<T>>(
      loader, nullptr, gemm_visitors<kind, store>(bias, shape), &map_d, epilogue, shape);
}

}  // namespace fusegen
