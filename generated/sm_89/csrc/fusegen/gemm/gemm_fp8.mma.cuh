// Grouped and dense GEMM by mma.sync with FP8 operands, for sm_89 and later: the kernel of
// gemm/gemm.mma.cuh over codes and their scales. Those that are constant along the contraction visit
// the result, those of blocks multiply the partial sums of their blocks.
#pragma once

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments_fp8.cuh"
#include "fusegen/gemm/config_fp8.mma.cuh"
#include "fusegen/gemm/gemm.mma.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, Accumulation accumulation,
          class Config, Store store, class Change>
static __global__ void __launch_bounds__(
    Fp8MmaTraits<kind, A, B, scaling, accumulation, Config, store>::kThreads, Config::ctas)
    ragged_fp8_mma_gemm(const MmaOperands in, const __grid_constant__ MmaResult<Change> result,
                        const __grid_constant__ Fp8MmaScales<kind, scaling> scales,
                        const Bias<Element> bias, const __grid_constant__ Shape shape) {
  using T = Fp8MmaTraits<kind, A, B, scaling, accumulation, Config, store>;
  if constexpr (scaling == Fp8Scaling::block) {
    run_mma_cta<kind, Element, store, T, Config>(in, result, gemm_visitors<kind, store>(bias, shape),
                                                 shape, {scales});
  } else {
    run_mma_cta<kind, Element, store, T, Config>(
        in, result, gemm_visitors<kind, store>(bias, shape, scales), shape);
  }
}

template <Gemm kind>
void set_scales(const Fp8GemmArguments& in, BlockScaleArrays* out) {
  const GemmArguments& g = in.gemm;
  const int32_t rows = int32_t(blocks(g.n, kScaleBlock)), columns = int32_t(blocks(g.k, kScaleBlock));
  const int64_t tokens = padded_tokens(g.tokens, g.groups);
  *out = kind == Gemm::wgrad
             ? BlockScaleArrays{in.scale_a, in.scale_b, int32_t(g.n), int32_t(g.k), 0}
             : BlockScaleArrays{in.scale_a, in.scale_b, int32_t(tokens), columns, rows};
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, Accumulation accumulation,
          class Config, Store store = Store::io, class Change = Keep>
static Status launch_fp8_mma_gemm(const Fp8GemmArguments& in, Stream& stream,
                                  const Change& change = {}) {
  using T = Fp8MmaTraits<kind, A, B, scaling, accumulation, Config, store>;
  if (Status status = check_fp8_arguments<kind>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  const GemmArguments& gemm = in.gemm;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  using Scales = Fp8MmaScales<kind, scaling>;
  Scales scales;
  set_scales<kind>(in, &scales);
  const MmaOperands operands{static_cast<const uint8_t*>(gemm.a),
                             static_cast<const uint8_t*>(gemm.b), uint32_t(in.pitch_a),
                             uint32_t(in.pitch_b)};
  static std::atomic<uint64_t> shared_memory_allowed{0};
  const auto result = mma_result<Element, store>(gemm, change);
  using Changed = decltype(result.change);
  return launch_cta<kind, T, Config, MmaOperands, MmaResult<Changed>, Scales, Bias<Element>>(
      &ragged_fp8_mma_gemm<kind, A, B, Element, scaling, accumulation, Config, store, Changed>,
      shared_memory_allowed, gemm, stream, operands, result, scales, bias_of<Element>(gemm));
}

}  // namespace fusegen
