// Grouped and dense GEMM by mma.sync with operands whose scales the instruction reads, for sm_120a:
// the kernel of gemm/gemm.mma.cuh over codes, whose scales come with each stage. Elsewhere a twin
// takes the instruction's place: see mainloop/warp_mma_scaled.mma.cuh.
#pragma once

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/arguments_scaled.cuh"
#include "fusegen/gemm/config_scaled.mma.cuh"
#include "fusegen/gemm/gemm.mma.cuh"
#include "fusegen/gemm/gemm_scaled.h"
#include "fusegen/visit/gemm_visitors.cuh"
#include "fusegen/visit/group_amaxes.cuh"

namespace fusegen {

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Multiply, class Element, Accumulation accumulation, class Config, Store store,
          class Change>
static __global__ void __launch_bounds__(
    ScaledMmaTraits<kind, Multiply, accumulation, Config>::kThreads, Config::ctas)
    ragged_scaled_mma_gemm(const __grid_constant__ ScaledOperands in,
                           const __grid_constant__ MmaResult<Change> result, const GroupAmaxes amaxes,
                           const Bias<Element> bias, const __grid_constant__ Shape shape) {
  using T = ScaledMmaTraits<kind, Multiply, accumulation, Config>;
  if constexpr (Multiply::kBits == 4) {
    run_mma_cta<kind, Element, store, T, Config>(in, result, gemm_visitors<kind, store>(bias, shape, amaxes),
                                                 shape);
  } else {
    run_mma_cta<kind, Element, store, T, Config>(in, result, gemm_visitors<kind, store>(bias, shape), shape);
  }
}

template <Gemm kind, class Multiply>
ScaledOperands scaled_operands(const ScaledGemmArguments& in) {
  const GemmArguments& g = in.gemm;
  const AtomCounts counts = atom_counts<kind, Multiply::kBlock>(g);
  return {{static_cast<const uint8_t*>(g.a), static_cast<const uint8_t*>(g.b), uint32_t(in.pitch_a),
           uint32_t(in.pitch_b)},
          static_cast<const uint8_t*>(in.scale_a),
          static_cast<const uint8_t*>(in.scale_b),
          counts.along,
          counts.rows_b};
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class Multiply, class Element, Accumulation accumulation, class Config,
          Store store = Store::io, class Change = Keep>
static Status launch_scaled_mma_gemm(const ScaledGemmArguments& in, Stream& stream,
                                     const Change& change = {}) {
  using T = ScaledMmaTraits<kind, Multiply, accumulation, Config>;
  if (Status status = check_scaled_arguments<kind, Multiply::kBits>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  const GemmArguments& gemm = in.gemm;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  const auto result = mma_result<Element, store>(gemm, change);
  using Changed = decltype(result.change);
  return launch_cta<kind, T, Config, ScaledOperands, MmaResult<Changed>, GroupAmaxes, Bias<Element>>(
      &ragged_scaled_mma_gemm<kind, Multiply, Element, accumulation, Config, store, Changed>,
      shared_memory_allowed, gemm, stream, scaled_operands<kind, Multiply>(in), result,
      GroupAmaxes{in.amax_a, in.amax_b}, bias_of<Element>(gemm));
}

}  // namespace fusegen
