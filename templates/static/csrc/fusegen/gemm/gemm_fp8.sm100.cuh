// Grouped and dense GEMM for sm_100a with FP8 operands: the kernel of gemm/gemm.sm100.cuh over
// codes, which lie as gemm/operands_codes.sm100.cuh says and whose scales visit the result. The tensor
// core's own sums are as good as fp32 ones, so there is one code for `Accumulation::fast` and `split`.
#pragma once

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments_fp8.cuh"
#include "fusegen/gemm/config_fp8.cuh"
#include "fusegen/gemm/gemm.sm100.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/gemm/operands_codes.sm100.cuh"

namespace fusegen {

// What a kernel is told of its scales.
template <Gemm kind, Fp8Scaling scaling>
using Tcgen05Scales = Fp8Scales<kind, scaling, void>;

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, class Config,
          Store store, class Change>
static __global__ void __launch_bounds__(Fp8Tcgen05Traits<kind, A, B, Config, store>::kThreads, 1)
    ragged_fp8_tcgen05_gemm(const __grid_constant__ CUtensorMap map_a,
                            const __grid_constant__ CUtensorMap map_b,
                            const __grid_constant__ CUtensorMap map_d,
                            const Tcgen05Scales<kind, scaling> scales, const Bias<Element> bias,
                            const __grid_constant__ Epilogue<Change, store> epilogue,
                            const __grid_constant__ Shape shape) {
  using T = Fp8Tcgen05Traits<kind, A, B, Config, store>;
  run_tcgen05_cta<T, Stored<Element, store>>(Tcgen05Loader<T>{&map_a, &map_b, {}},
                                             gemm_visitors<kind, store>(bias, shape, scales),
                                             &map_d, epilogue, shape);
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, class Config,
          Store store = Store::io, class Change = Keep>
static Status launch_fp8_tcgen05_gemm(const Fp8GemmArguments& in, Stream& stream,
                                      const Change& change = {}) {
  static_assert(scaling != Fp8Scaling::block, "sums in tensor memory have no scales of blocks");
  using T = Fp8Tcgen05Traits<kind, A, B, Config, store>;
  const GemmArguments& gemm = in.gemm;
  Status status = check_arguments(gemm);
  if (status.ok()) status = check_code_rows<kind>(gemm, in.pitch_a, in.pitch_b);
  if (!status.ok()) return status;
  using Result = Stored<Element, store>;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  if (in.scale_a == nullptr || in.scale_b == nullptr) {
    return {static_cast<int>(cudaErrorInvalidValue), "scale_a and scale_b"};
  }
  CUtensorMap a, b, d;
  status = encode_codes_as_rows<kind, Result, T>(gemm, in.pitch_a, in.pitch_b, &a, &b, &d);
  if (!status.ok()) return status;
  Tcgen05Scales<kind, scaling> scales;
  set_scales<kind>(in, &scales);
  Epilogue<Change, store> epilogue{change};
  status = encode_epilogue<Element>(gemm.epilogue, columns_of<kind>(gemm), &epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap,
                    Tcgen05Scales<kind, scaling>, Bias<Element>, Epilogue<Change, store>>(
      &ragged_fp8_tcgen05_gemm<kind, A, B, Element, scaling, Config, store, Change>,
      shared_memory_allowed, gemm, stream, a, b, d, scales, bias_of<Element>(gemm), epilogue);
}

}  // namespace fusegen
