// The GEMMs of mma.sync.
#pragma once

#include "codes.h"
#include "problems.h"
#include "scaled.h"

#include "fusegen/gemm/gemm.mma.cuh"
#include "fusegen/gemm/gemm_fp8.mma.cuh"
#include "fusegen/gemm/gemm_scaled.mma.cuh"

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

template <class Multiply>
inline constexpr Format kFormatA = Multiply::kWideA ? Format::e5m2 : Format::e4m3;
template <>
inline constexpr Format kFormatA<fusegen::NvWarpMma> = Format::e2m1;
template <class Multiply>
inline constexpr Format kFormatB = Multiply::kWideB ? Format::e5m2 : Format::e4m3;
template <>
inline constexpr Format kFormatB<fusegen::NvWarpMma> = Format::e2m1;

template <Gemm kind, Store store, class Multiply, Accumulation accumulation, class Config>
void run_atoms_mma(const Case& in) {
  run_atoms<kind, store, kFormatA<Multiply>, kFormatB<Multiply>>(
      in, [](const ScaledGemmArguments& arguments, auto as) {
        Stream stream;
        return fusegen::launch_scaled_mma_gemm<kind, Multiply, Result, accumulation, Config, as.kStore>(
            arguments, stream, as.change);
      });
}

}  // namespace sim
