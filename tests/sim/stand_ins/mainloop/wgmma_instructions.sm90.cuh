#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>

#include "matrices.h"

namespace fusegen {

enum class Major { K, MN };
enum class ScaleOut { Zero, One };

inline void fence_mmas() { sim::sync_warp(); }
inline void fence_register(float&) {}
inline void commit_mmas() { sim::mmas[sim::cluster.current].commit(); }
template <int Left>
void wait_for_mmas() {
  sim::wait_for_mmas(Left);
}

template <class Element>
constexpr sim::Format format_of() {
  if (std::is_same_v<Element, __nv_bfloat16>) return sim::Format::bf16;
  if (std::is_same_v<Element, __half>) return sim::Format::f16;
  return std::is_same_v<Element, __nv_fp8_e4m3> ? sim::Format::e4m3 : sim::Format::e5m2;
}

template <int N, class A, class B, Major major_a, Major major_b>
void issue_mma(float* d, uint64_t a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  static_assert(sizeof(A) == 2 || (major_a == Major::K && major_b == Major::K));
  std::array<float*, N / 2> accumulators;
  for (int i = 0; i < N / 2; ++i) accumulators[i] = d + i;
  sim::issue_mma<N>({a, major_a == Major::MN, format_of<A>()},
                    {b, major_b == Major::MN, format_of<B>()}, accumulators,
                    scale == ScaleOut::Zero);
}

}  // namespace fusegen
