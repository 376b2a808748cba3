// What is fixed when an FP8 kernel is compiled, beyond what config_sm90.cuh says.
#pragma once

#include <cstdint>

#include "config_sm90.cuh"
#include "gemm_fp8.h"
#include "mma_fp8_sm90.cuh"

namespace fusegen {

// Block scales of one stage: of the tile's rows, and in wgrad of its columns.
template <Gemm kind, Fp8Scaling scaling, class Config>
struct StageScales {
  static constexpr bool kRows = scaling == Fp8Scaling::block;
  static constexpr bool kColumns = kRows && kind == Gemm::wgrad;
  static constexpr int kBytesA = kRows ? Config::tile_m * int(sizeof(float)) : 0;
  static constexpr int kBytesB = kColumns ? Config::tile_n * int(sizeof(float)) : 0;
  static constexpr int kBytes = kBytesA + kBytesB;
  static_assert(kBytesA % 128 == 0 && kBytesB % 128 == 0, "TMA writes at multiples of 128 bytes");
};

// Only wgrad sorts its groups; without that order the barriers and tile records fit into 1 KiB.
template <Gemm kind>
inline constexpr int kFp8ControlBytes = kind == Gemm::wgrad ? 2048 : 1024;

template <Gemm kind, class A, class B, Fp8Scaling scaling, Accumulation accumulation, class Config,
          Store store>
struct Fp8Traits : TileTraits<Config, 1, 2, store, StageScales<kind, scaling, Config>::kBytes,
                              kFp8ControlBytes<kind>> {
  using InStage = StageScales<kind, scaling, Config>;
  using Mma = Fp8WarpgroupMma<A, B>;
  static constexpr bool kRaggedRows = kind != Gemm::wgrad;
  static constexpr int kSortedGroups = kind == Gemm::wgrad ? DepthWalk<Config>::kSortedGroups : 1;
  static constexpr Major kMajorA = Major::K;
  static constexpr Major kMajorB = Major::K;
  static constexpr int kRankA = 2;
  static constexpr int kRankB = kind == Gemm::wgrad ? 2 : 3;

  static_assert(scaling != Fp8Scaling::block || accumulation == Accumulation::split,
                "block scales are applied where sums are split");
  static_assert(accumulation == Accumulation::fast || Config::schedule == Schedule::cooperative,
                "one warpgroup adds up while the other one's MMAs run");
};

}  // namespace fusegen
