// The GEMMs of sm_90a.
#pragma once

#include "codes.h"
#include "problems.h"

#include "fusegen/gemm/gemm_decoded.sm90.cuh"
#include "fusegen/gemm/gemm_gather.sm90.cuh"
#include "fusegen/gemm/launch_fp8.sm90.cuh"

namespace sim {

using fusegen::Gather;

template <Gemm kind, Store store, class Config>
void run_hopper(const Case& in) {
  run_16_bits<kind, store>(in, unscaled, unscaled, [](const GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_gemm<kind, Result, Config, as.kStore>(arguments, stream, as.change);
  });
}

// The arguments have the slots of rows behind those of the GEMM.
template <Gemm kind, Store store, Gather gather, class Config>
void run_gathered_hopper(const Case& in) {
  Tokens tokens(in.tokens, gather == Gather::b || kind == Gemm::fprop ? in.k : in.n);
  run_16_bits<kind, store>(
      in, unscaled, unscaled,
      [&](const GemmArguments& arguments, auto as) {
        Stream stream;
        const fusegen::GatheredGemmArguments gathered{arguments, tokens.row_slot.data(),
                                                      Tokens::kChoices};
        return fusegen::launch_gathered_gemm<kind, Result, Config, as.kStore, gather>(
            gathered, stream, as.change);
      },
      gather == Gather::a ? &tokens : nullptr, gather == Gather::b ? &tokens : nullptr);
}

template <Gemm kind, Store store, bool amaxes, class Config>
void run_decoded_hopper(const Case& in) {
  run_decoded<kind, store, amaxes>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    constexpr EndScale kNone = EndScale::none;
    return fusegen::launch_decoded_gemm<kind, Result, Config, as.kStore, kNone, kNone>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, EndScale of_a, EndScale of_b, class Config>
void run_scaled_hopper(const Case& in) {
  run_scaled<kind, store, of_a, of_b>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_decoded_gemm<kind, Result, Config, as.kStore, of_a, of_b>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, Accumulation accumulation,
          class Config>
void run_fp8(const Case& in) {
  run_codes<kind, store, A, B, scaling>(in, [](const Fp8GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_fp8_gemm<kind, A, B, Result, scaling, accumulation, Config, as.kStore>(
        arguments, stream, as.change);
  });
}

}  // namespace sim
