// Float32 functions of one element, called by generated pointwise code.
//
// Every function is written with IEEE operations and the accurate C library (no fast-math intrinsics), takes
// +-0, subnormals and both infinities to their limits, and propagates NaN. The header compiles for the host
// too, so that what a kernel computes can be checked without a GPU.
#pragma once

#include <math.h>

#ifdef __CUDACC__
#define FUSEGEN_INLINE __host__ __device__ __forceinline__
#else
#define FUSEGEN_INLINE inline
#endif

namespace fusegen {

// 1 / y for 1 <= y <= 2, rounded to nearest. The compiler's own division has a branch for the ends of the
// range, which keeps one element from overlapping the next.
FUSEGEN_INLINE float reciprocal_from_1_to_2(float y) {
#ifdef __CUDA_ARCH__
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(y));
  return ::fmaf(estimate, ::fmaf(-y, estimate, 1.0f), estimate);
#else
  return 1.0f / y;
#endif
}

// e^-|x|. Zero where e^|x| would overflow, as PyTorch's sigmoid of -|x| is: the true value there is subnormal.
FUSEGEN_INLINE float sigmoid_tail(float x) {
  constexpr float kOverflow = 88.7228394f;
  const float below_overflow = ::expf(-::fabsf(x));  // by itself, or compilers would branch around it
  return ::fabsf(x) > kOverflow ? 0.0f : below_overflow;
}

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x): the exponential stays in [0, 1].
FUSEGEN_INLINE float sigmoid(float x) {
  const float tail = sigmoid_tail(x);
  const float positive = reciprocal_from_1_to_2(1.0f + tail);
  return x >= 0.0f ? positive : tail * positive;
}

// s (1 - s) for s = sigmoid(x), as e^-|x| / (1 + e^-|x|)^2: 1 - s would be 0 from 17 on, where the slope still
// is a number of 16 bits. Beside the sigmoid of the same x it takes two products: compilers share the rest.
FUSEGEN_INLINE float sigmoid_slope(float x) {
  const float tail = sigmoid_tail(x);
  const float positive = reciprocal_from_1_to_2(1.0f + tail);
  return tail * positive * positive;
}

FUSEGEN_INLINE float tanh(float x) { return ::tanhf(x); }

// Comparing instead of fmaxf: fmaxf(NaN, 0) is 0.
FUSEGEN_INLINE float relu(float x) { return x <= 0.0f ? 0.0f : x; }

FUSEGEN_INLINE float clamp(float x, float lo, float hi) { return x < lo ? lo : (x > hi ? hi : x); }

// NaN of either argument wins, unlike fminf and fmaxf.
FUSEGEN_INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
FUSEGEN_INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }

// log(1 + e^x) as max(x, 0) + log(1 + e^-|x|): the exponential never overflows.
FUSEGEN_INLINE float softplus(float x) { return relu(x) + ::log1pf(::expf(-::fabsf(x))); }

FUSEGEN_INLINE float erf(float x) { return ::erff(x); }
FUSEGEN_INLINE float erfc(float x) { return ::erfcf(x); }
FUSEGEN_INLINE float exp(float x) { return ::expf(x); }
FUSEGEN_INLINE float exp2(float x) { return ::exp2f(x); }
FUSEGEN_INLINE float sqrt(float x) { return ::sqrtf(x); }

// Rounded twice at most; the hardware's rsqrt is off by up to two units and flushes subnormals.
FUSEGEN_INLINE float rsqrt(float x) { return 1.0f / ::sqrtf(x); }

FUSEGEN_INLINE float abs(float x) { return ::fabsf(x); }
FUSEGEN_INLINE float sign(float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); }

}  // namespace fusegen

#undef FUSEGEN_INLINE
