#pragma once

#include <array>

#include "matrices.h"

namespace cute {

inline void warpgroup_arrive() { sim::sync_warp(); }
inline void warpgroup_commit_batch() { sim::mmas[sim::cluster.current].commit(); }
inline void warpgroup_fence_operand(float&) {}
template <int Left>
void warpgroup_wait() {
  sim::wait_for_mmas(Left);
}

namespace SM90::GMMA {

enum class Major { K, MN };
enum class ScaleOut { Zero = 0, One = 1 };

// An accumulator, or whether to add to all of them. Packs of 129 parameters compile several times
// faster into an array of these than into a tuple.
struct Argument {
  float* accumulator = nullptr;
  ScaleOut scale = ScaleOut::One;

  explicit Argument(float& value) : accumulator(&value) {}
  explicit Argument(ScaleOut value) : scale(value) {}
};

template <int N, Major major_a, Major major_b, sim::Format format_a, sim::Format format_b>
struct Atom {
  // Two descriptors, then N / 2 accumulators and whether to add to them.
  template <class... Rest>
  static void fma(uint64_t a, uint64_t b, Rest&&... rest) {
    static_assert(sizeof...(Rest) == N / 2 + 1);
    const Argument arguments[] = {Argument(rest)...};
    std::array<float*, N / 2> d;
    for (size_t i = 0; i < d.size(); ++i) d[i] = arguments[i].accumulator;
    sim::issue_mma<N>({a, major_a == Major::MN, format_a}, {b, major_b == Major::MN, format_b}, d,
                      arguments[N / 2].scale == ScaleOut::Zero);
  }
};

// The names that the kernels choose from. 8-bit operands are K-major and have one template
// parameter that no kernel sets.
#define SIM_FP8_MMA(N, NAME, A, B)          \
  template <int = 0>                        \
  struct MMA_64x##N##x32_F32##NAME##_SS_TN \
      : Atom<N, Major::K, Major::K, sim::Format::A, sim::Format::B> {};
#define SIM_MMA(N, NAME, FORMAT)         \
  template <Major a, Major b>            \
  struct MMA_64x##N##x16_F32##NAME##_SS \
      : Atom<N, a, b, sim::Format::FORMAT, sim::Format::FORMAT> {};
#define SIM_MMAS(N)                     \
  SIM_FP8_MMA(N, E4M3E4M3, e4m3, e4m3) \
  SIM_FP8_MMA(N, E4M3E5M2, e4m3, e5m2) \
  SIM_FP8_MMA(N, E5M2E4M3, e5m2, e4m3) \
  SIM_FP8_MMA(N, E5M2E5M2, e5m2, e5m2) \
  SIM_MMA(N, BF16BF16, bf16)           \
  SIM_MMA(N, F16F16, f16)
SIM_MMAS(64)
SIM_MMAS(128)
SIM_MMAS(192)
SIM_MMAS(256)
#undef SIM_MMAS
#undef SIM_MMA
#undef SIM_FP8_MMA

}  // namespace SM90::GMMA
}  // namespace cute
