// What is fixed when an FP8 kernel is compiled, beyond what gemm/config.sm90.cuh says.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/config.sm90.cuh"
#include "fusegen/gemm/config_fp8.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/block_scales.sm90.cuh"
#include "fusegen/mainloop/wgmma_fp8.sm90.cuh"

namespace fusegen {

template <Gemm kind, Fp8Scaling scaling>
using Scales = Fp8Scales<kind, scaling, BlockScales<kind>>;

// Only wgrad sorts its groups; without that order the barriers and tile records fit into 1 KiB.
template <Gemm kind>
inline constexpr int kFp8ControlBytes = kind == Gemm::wgrad ? 2048 : 1024;

template <Gemm kind, class A, class B, Fp8Scaling scaling, Accumulation accumulation, class Config,
          Store store>
struct Fp8Traits : TileTraits<Config, 1, 2, store, StageScales<kind, scaling, Config>::kBytes,
                              kFp8ControlBytes<kind>> {
  using InStage = StageScales<kind, scaling, Config>;
  using Mma = Fp8WarpgroupMma<A, B>;
  static constexpr Gemm kKind = kind;
  static constexpr Store kStore = store;
  using Walk = Walker<kind, Config>;
  using Source = TileSource<kind, Config>;
  using Coordinates = std::conditional_t<is_gated(store), GatedCoordinates<Config::tile_n / 2>,
                                         CodeCoordinates<kind>>;
  // Elements of the contraction whose products one set of partial sums adds up; 0: all of them.
  static constexpr int kPromotionInterval =
      accumulation == Accumulation::split ? Config::tile_k : 0;
  static constexpr Major kMajorA = Major::K;
  static constexpr Major kMajorB = Major::K;

  static_assert(kind == Gemm::fprop || !is_gated(store));
  static_assert(scaling != Fp8Scaling::block || accumulation == Accumulation::split,
                "block scales are applied where sums are split");
  static_assert(accumulation == Accumulation::fast || Config::schedule == Schedule::cooperative,
                "one warpgroup adds up while the other one's MMAs run");
};

// `agrees` of gemm/config.sm90.cuh, and the same of what FP8 operands add.
template <class Stated, Gemm kind, Fp8Scaling scaling, class T, class Config>
constexpr bool agrees_fp8() {
  static_assert(agrees<Stated, T, Config>());
  static_assert(agrees_codes<Stated, kind, scaling, T::kPromotionInterval>());
  static_assert(Stated::scale_bytes == T::InStage::kBytes, "scale_bytes: unit against traits");
  return true;
}

}  // namespace fusegen
