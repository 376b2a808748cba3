// The GEMMs of mma.sync.
#pragma once

#include "codes.h"
#include "problems.h"

#include "fusegen/gemm/gemm.mma.cuh"
#include "fusegen/gemm/gemm_fp8.mma.cuh"

namespace sim {

template <Gemm kind, Store store, class Config>
void run_mma(const Case& in) {
  run_16_bits<kind, store>(in, unscaled, unscaled, [](const GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_mma_gemm<kind, Result, Config, as.kStore>(arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, bool amaxes, class Config>
void run_decoded_mma(const Case& in) {
  run_decoded<kind, store, amaxes>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    constexpr EndScale kNone = EndScale::none;
    return fusegen::launch_decoded_mma_gemm<kind, Result, Config, as.kStore, kNone, kNone>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, EndScale of_a, EndScale of_b, class Config>
void run_scaled_mma(const Case& in) {
  run_scaled<kind, store, of_a, of_b>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_decoded_mma_gemm<kind, Result, Config, as.kStore, of_a, of_b>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, Accumulation accumulation,
          class Config>
void run_fp8_mma(const Case& in) {
  run_codes<kind, store, A, B, scaling>(in, [](const Fp8GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_fp8_mma_gemm<kind, A, B, Result, scaling, accumulation, Config,
                                        as.kStore>(arguments, stream, as.change);
  });
}

}  // namespace sim
