// Grouped and dense GEMM for sm_90a with FP8 operands: the kernel of gemm/gemm.sm90.cuh over codes
// and their scales. Those that are constant along the contraction visit the result, those of blocks
// come with the stages whose partial sums they multiply.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/config_fp8.sm90.cuh"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/load/block_scales.sm90.cuh"
#include "fusegen/mainloop/promotion.sm90.cuh"
#include "fusegen/mainloop/running_sums.sm90.cuh"
#include "fusegen/mainloop/split_sums.sm90.cuh"
#include "fusegen/visit/gemm_visitors.cuh"

namespace fusegen {

// How the parts of a kernel with traits `T` differ by its scales and sums.
template <class T, Fp8Scaling scaling, Accumulation accumulation>
struct Fp8Parts {
  static constexpr Gemm kKind = T::kKind;
  static constexpr bool kBlocks = scaling == Fp8Scaling::block;
  using InStage = typename T::InStage;
  using Extras = std::conditional_t<kBlocks, BlockScaleLoader<kKind, InStage>, NoExtras>;
  using Loader = TmaLoader<T, typename T::Coordinates, Extras>;
  using BlockPromotion =
      std::conditional_t<kKind == Gemm::wgrad, RowAndColumnPromotion<InStage>,
                         WeightPromotion<kKind, InStage>>;
  using Promotion = std::conditional_t<kBlocks, BlockPromotion, PlainPromotion>;
  static constexpr bool kSplit = accumulation == Accumulation::split;
  using Mainloop = std::conditional_t<kSplit, SplitSums<T, Promotion>, RunningSums<T>>;

  template <class Element>
  __device__ static auto visits(const Bias<Element>& bias, const Shape& shape,
                                const Scales<kKind, scaling>& scales) {
    if constexpr (kBlocks) {
      return gemm_visitors<kKind, T::kStore>(bias, shape);
    } else {
      return gemm_visitors<kKind, T::kStore>(bias, shape, scales);
    }
  }
};

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, Accumulation accumulation,
          class Config, Store store, class Change>
static __global__ void __launch_bounds__(
    Fp8Traits<kind, A, B, scaling, accumulation, Config, store>::kThreads, 1)
    ragged_fp8_gemm(const __grid_constant__ CUtensorMap map_a,
                    const __grid_constant__ CUtensorMap map_b,
                    const __grid_constant__ CUtensorMap map_d,
                    const __grid_constant__ Scales<kind, scaling> scales, const Bias<Element> bias,
                    const __grid_constant__ Epilogue<Change, store> epilogue,
                    const __grid_constant__ Shape shape) {
  using T = Fp8Traits<kind, A, B, scaling, accumulation, Config, store>;
  using Parts = Fp8Parts<T, scaling, accumulation>;
  const typename Parts::Loader loader{&map_a, &map_b, typename Parts::Extras(&scales)};
  run_cta<T, Stored<Element, store>, typename Parts::Mainloop>(
      loader, &scales, Parts::visits(bias, shape, scales), &map_d, epilogue, shape);
}

}  // namespace fusegen
