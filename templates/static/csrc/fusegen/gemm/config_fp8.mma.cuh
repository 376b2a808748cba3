// What is fixed when an FP8 kernel of mma.sync is compiled, beyond what gemm/config.mma.cuh says.
#pragma once

#include <type_traits>

#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/gemm/config_fp8.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/code_addresses.mma.cuh"
#include "fusegen/mainloop/running_sums.mma.cuh"
#include "fusegen/mainloop/split_sums.mma.cuh"
#include "fusegen/mainloop/warp_mma_fp8.mma.cuh"

namespace fusegen {

template <Gemm kind, Fp8Scaling scaling>
using Fp8MmaScales = Fp8Scales<kind, scaling, BlockScaleArrays>;

template <Gemm kind, Fp8Scaling scaling, Accumulation accumulation>
using Fp8WarpSums = std::conditional_t<
    scaling == Fp8Scaling::block, ScaledWarpSums<kind>,
    std::conditional_t<accumulation == Accumulation::split, SplitWarpSums, RunningWarpSums>>;

template <Gemm kind, class A, class B, Fp8Scaling scaling, Accumulation accumulation, class Config,
          Store store>
struct Fp8MmaTraits : MmaTileTraits<kind, Fp8WarpMma<A, B>, Config,
                                    Fp8WarpSums<kind, scaling, accumulation>> {
  using Addresses = CodeAddresses<kind>;
  static_assert(scaling != Fp8Scaling::block || accumulation == Accumulation::split,
                "block scales are applied where sums are split");
};

// `agrees` of gemm/config.mma.cuh, and the same of what FP8 operands add.
template <class Stated, Gemm kind, Fp8Scaling scaling, class T, class Config>
constexpr bool agrees_fp8() {
  static_assert(agrees<Stated, T, Config>());
  static_assert(agrees_codes<Stated, kind, scaling, T::WarpSums::kInterval>());
  return true;
}

}  // namespace fusegen
