// Grouped and dense GEMM for sm_90a with FP8 operands: the kernel of gemm/gemm.sm90.cuh over the
// mainloops of mainloop/mainloop_fp8.sm90.cuh.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/mainloop/mainloop_fp8.sm90.cuh"

namespace fusegen {

// Scales of blocks are applied to partial sums, others to the whole.
template <Gemm kind, Fp8Scaling scaling, Store store, class Element>
__device__ auto fp8_visitors(const Bias<Element>& bias, const Shape& shape,
                             const Scales<kind, scaling>& scales) {
  if constexpr (scaling == Fp8Scaling::block) return gemm_visitors<kind, store>(bias, shape);
  else return gemm_visitors<kind, store>(bias, shape, scales);
}

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, Accumulation accumulation,
          class Config, Store store>
static __global__ void __launch_bounds__(
    Fp8Traits<kind, A, B, scaling, accumulation, Config, store>::kThreads, 1)
    ragged_fp8_gemm(const __grid_constant__ CUtensorMap map_a,
                    const __grid_constant__ CUtensorMap map_b,
                    const __grid_constant__ CUtensorMap map_d,
                    const __grid_constant__ Scales<kind, scaling> scales, const Bias<Element> bias,
                    const __grid_constant__ Shape shape) {
  using T = Fp8Traits<kind, A, B, scaling, accumulation, Config, store>;
  run_cta<kind, Element, store, T, Config>(
      Fp8Operands<kind, scaling, accumulation, T, Config>{&map_a, &map_b, &scales}, &map_d,
      fp8_visitors<kind, scaling, store>(bias, shape, scales), shape);
}

}  // namespace fusegen
