// What kernels share that reduce along rows of 16-bit elements: 16 bytes as fp32 and back, and the
// threads that have a row together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/fragment/pairs.cuh"

namespace fusegen {

namespace row {

inline constexpr int kWarp = 32;
inline constexpr int kVector = kRowAlignment;  // elements in 16 bytes
inline constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

// The two elements of a word. Those of bfloat16 by their bits: compilers take the upper half of a
// pair apart in two steps.
__device__ __forceinline__ void widen(uint32_t word, float* to, __nv_bfloat16) {
  to[0] = __uint_as_float(word << 16);
  to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen(uint32_t word, float* to, __half) {
  const float2 pair = widen_pair(reinterpret_cast<const __half2&>(word));
  to[0] = pair.x;
  to[1] = pair.y;
}

template <class Element>
__device__ __forceinline__ void unpack(const uint4& packed, float (&to)[kVector]) {
  widen(packed.x, to, Element());
  widen(packed.y, to + 2, Element());
  widen(packed.z, to + 4, Element());
  widen(packed.w, to + 6, Element());
}

// Each rounded once.
template <class Element>
__device__ __forceinline__ uint4 pack(const float (&from)[kVector]) {
  return make_uint4(round_pair(from[0], from[1], Element()), round_pair(from[2], from[3], Element()),
                    round_pair(from[4], from[5], Element()), round_pair(from[6], from[7], Element()));
}

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }  // drops NaN
};

// The threads that have a row: a warp, four to a CTA, or a CTA.
template <int kThreads>
struct Team {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
  static constexpr int kSize = kThreads;
  static constexpr int kCta = kThreads == kWarp ? 4 * kWarp : kThreads;
  static constexpr int kRows = kCta / kThreads;  // of a CTA
  static constexpr int kCtasPerSm = 1024 / kCta;  // at least: 64 registers a thread
  static constexpr int kWarps = kThreads / kWarp;

  using Partial = float[kWarps];  // in shared memory, another one for each reduction of a kernel

  __device__ static int thread() { return threadIdx.x % kThreads; }
  __device__ static int64_t index() { return int64_t(blockIdx.x) * kRows + threadIdx.x / kThreads; }
  static int64_t ctas(int64_t rows) { return (rows + kRows - 1) / kRows; }

  // The same value for every thread, in a fixed order: by a butterfly in each warp, then warp by
  // warp. All threads of the team call it.
  template <class Combine>
  __device__ static float reduce(float value, Combine combine, Partial& partial) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    if constexpr (kWarps > 1) {
      if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
      __syncthreads();
      value = partial[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) value = combine(value, partial[warp]);
    }
    return value;
  }
};

}  // namespace row

}  // namespace fusegen
