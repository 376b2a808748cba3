// Warpgroup MMA on FP8 operands. Both are K-major: the hardware offers nothing else for 8 bits.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "fusegen/mainloop/wgmma.sm90.cuh"

namespace fusegen {

template <class A, class B, int N>
constexpr auto select_fp8_mma() {
  using namespace cute::SM90::GMMA;
  constexpr bool kWideA = std::is_same_v<A, __nv_fp8_e5m2>;
  constexpr bool kWideB = std::is_same_v<B, __nv_fp8_e5m2>;
  static_assert(kWideA || std::is_same_v<A, __nv_fp8_e4m3>);
  static_assert(kWideB || std::is_same_v<B, __nv_fp8_e4m3>);
  if constexpr (!kWideA && !kWideB) {
    if constexpr (N == 64) return MMA_64x64x32_F32E4M3E4M3_SS_TN<>{};
    if constexpr (N == 128) return MMA_64x128x32_F32E4M3E4M3_SS_TN<>{};
    if constexpr (N == 192) return MMA_64x192x32_F32E4M3E4M3_SS_TN<>{};
    if constexpr (N == 256) return MMA_64x256x32_F32E4M3E4M3_SS_TN<>{};
  } else if constexpr (!kWideA) {
    if constexpr (N == 64) return MMA_64x64x32_F32E4M3E5M2_SS_TN<>{};
    if constexpr (N == 128) return MMA_64x128x32_F32E4M3E5M2_SS_TN<>{};
    if constexpr (N == 192) return MMA_64x192x32_F32E4M3E5M2_SS_TN<>{};
    if constexpr (N == 256) return MMA_64x256x32_F32E4M3E5M2_SS_TN<>{};
  } else if constexpr (!kWideB) {
    if constexpr (N == 64) return MMA_64x64x32_F32E5M2E4M3_SS_TN<>{};
    if constexpr (N == 128) return MMA_64x128x32_F32E5M2E4M3_SS_TN<>{};
    if constexpr (N == 192) return MMA_64x192x32_F32E5M2E4M3_SS_TN<>{};
    if constexpr (N == 256) return MMA_64x256x32_F32E5M2E4M3_SS_TN<>{};
  } else {
    if constexpr (N == 64) return MMA_64x64x32_F32E5M2E5M2_SS_TN<>{};
    if constexpr (N == 128) return MMA_64x128x32_F32E5M2E5M2_SS_TN<>{};
    if constexpr (N == 192) return MMA_64x192x32_F32E5M2E5M2_SS_TN<>{};
    if constexpr (N == 256) return MMA_64x256x32_F32E5M2E5M2_SS_TN<>{};
  }
}

template <class A, class B>
struct Fp8WarpgroupMma {
  // One k32 step: the first `Used` waves, the first `Width` of N columns.
  template <int Used, int Width, int Waves, int N>
  static __device__ void step(Accumulators<Waves, N>& d, uint64_t a, uint64_t b,
                              ScaleOut scale = ScaleOut::One) {
    using Atom = decltype(select_fp8_mma<A, B, Width>());
    static_assert(Used <= Waves && Width <= N);
#pragma unroll
    for (int wave = 0; wave < Used; ++wave) {
      issue_mma<Atom>(a + wave * kRowStep, b, d.values[wave],
                      std::make_integer_sequence<int, Width / 2>{}, scale);
    }
  }
};

}  // namespace fusegen
