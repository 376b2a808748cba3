// The GEMMs of sm_100a, whose tensor core is software.
#pragma once

#include "atoms.h"
#include "codes.h"

#include "fusegen/gemm/gemm_fp8.sm100.cuh"
#include "fusegen/gemm/gemm_scaled.sm100.cuh"

namespace sim {

template <Gemm kind, Store store, class Config>
void run_tcgen05(const Case& in) {
  run_16_bits<kind, store>(in, unscaled, unscaled, [](const GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_tcgen05_gemm<kind, Result, Config, as.kStore>(arguments, stream,
                                                                         as.change);
  });
}

template <Gemm kind, Store store, bool amaxes, class Config>
void run_decoded_tcgen05(const Case& in) {
  run_decoded<kind, store, amaxes>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    constexpr EndScale kNone = EndScale::none;
    return fusegen::launch_decoded_tcgen05_gemm<kind, Result, Config, as.kStore, kNone, kNone>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, EndScale of_a, EndScale of_b, class Config>
void run_scaled_tcgen05(const Case& in) {
  run_scaled<kind, store, of_a, of_b>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_decoded_tcgen05_gemm<kind, Result, Config, as.kStore, of_a, of_b>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, class Config>
void run_fp8_tcgen05(const Case& in) {
  const auto launch = [](const Fp8GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_fp8_tcgen05_gemm<kind, A, B, Result, scaling, Config, as.kStore>(
        arguments, stream, as.change);
  };
  run_codes<kind, store, A, B, scaling, CodesAsRows>(in, launch);
}

template <Gemm kind, Store store, class A, class B, class Config>
void run_mx_tcgen05(const Case& in) {
  run_atoms<kind, store, MxFormat<A>, MxFormat<B>>(in, [](const ScaledGemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_scaled_tcgen05_gemm<kind, A, B, Result, Config, as.kStore>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, class Config>
void run_nv_tcgen05(const Case& in) {
  run_atoms<kind, store, NvFormat, NvFormat>(in, [](const ScaledGemmArguments& arguments, auto as) {
    Stream stream;
    using Code = __nv_fp4_e2m1;
    return fusegen::launch_scaled_tcgen05_gemm<kind, Code, Code, Result, Config, as.kStore>(
        arguments, stream, as.change);
  });
}

}  // namespace sim
