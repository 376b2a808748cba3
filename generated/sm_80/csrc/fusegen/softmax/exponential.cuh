// Exponentials of scores less the largest of their row, and what is subtracted.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

namespace fusegen {

namespace softmax {

inline constexpr float kLog2e = 1.44269504f;

// What is subtracted of scores before the exponential: the largest, or 0 where all are -inf, since
// -inf less -inf is NaN.
__device__ __forceinline__ float shift_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// e^(score - shift). Below 2^-126 it is 0, which no sum of a row with an exponential of 1 tells
// apart, and takes one instruction instead of four. NaN stays NaN.
__device__ __forceinline__ float exponential(float score, float shift) {
  const float exponent = (score - shift) * kLog2e;
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
#else
  return exponent < -126.0f ? 0.0f : exp2f(exponent);
#endif
}

}  // namespace softmax

}  // namespace fusegen
