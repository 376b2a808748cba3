// Grouped and dense GEMM for sm_90a over operands decoded to bf16: the kernel of
// gemm/gemm.sm90.cuh, its result times what the operands' scales leave for the end, in fp32.
#pragma once

#include <cstdint>

#include "fusegen/gemm/decoded.cuh"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/gemm/launch.sm90.cuh"

namespace fusegen {

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class Element, class Config, Store store, class Scales, class Change>
static __global__ void __launch_bounds__(Traits<kind, __nv_bfloat16, Config, store>::kThreads, 1)
    ragged_decoded_gemm(const __grid_constant__ CUtensorMap map_a,
                        const __grid_constant__ CUtensorMap map_b,
                        const __grid_constant__ CUtensorMap map_d, const Scales scales,
                        const Bias<Element> bias,
                        const __grid_constant__ Epilogue<Change, store> epilogue,
                        const __grid_constant__ Shape shape) {
  using T = Traits<kind, __nv_bfloat16, Config, store>;
  const PlainLoader<T> loader{&map_a, &map_b, {}};
  run_cta<T, Stored<Element, store>, RunningSums<T>>(
      loader, nullptr, gemm_visitors<kind, store>(bias, shape, scales), &map_d, epilogue, shape);
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class Element, class Config, Store store = Store::io,
          EndScale of_a = EndScale::none, EndScale of_b = EndScale::none, class Change = Keep>
static Status launch_decoded_gemm(const DecodedGemmArguments& in, Stream& stream,
                                  const Change& change = {}) {
  using T = Traits<kind, __nv_bfloat16, Config, store>;
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
      &ragged_decoded_gemm<kind, Element, Config, store, Scales, Change>, shared_memory_allowed,
      gemm, stream, told.a, told.b, told.d, scales, bias_of<Element>(gemm), told.epilogue);
}

}  // namespace fusegen
