// y = x / (1 - p) where an element is kept, 0 elsewhere, and the bits that say which are kept.
//
// Random numbers are Philox4x32-10 of seed, offset and the place of an element alone: key is the seed,
// counter the number of the four elements that share a call, and the offset. They do not depend on
// how the tensor is cut into blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/dropout/dropout.h"
#include "fusegen/dropout/elements.cuh"
#include "fusegen/quantize/math.cuh"

namespace fusegen {

namespace dropout {

inline constexpr int kCalls = row::kVector / 4;  // of Philox, for a vector

// Elements are zeroed whose random number, of 31 bits, is below it: p = 1 zeroes all, p = 0 none.
inline uint32_t threshold_of(float p) { return uint32_t(p * 2147483648.0f); }

// Bit i: element i of a vector is kept.
__device__ __forceinline__ uint32_t kept_bits(int64_t vector, int64_t seed, int64_t offset,
                                              uint32_t threshold) {
  PhiloxWords drawn[kCalls];
#pragma unroll
  for (int call = 0; call < kCalls; ++call) {
    const uint64_t four = uint64_t(vector) * kCalls + call;
    drawn[call] = {{uint32_t(four), uint32_t(four >> 32), uint32_t(offset),
                    uint32_t(uint64_t(offset) >> 32)}};
  }
  philox(drawn, uint32_t(seed), uint32_t(uint64_t(seed) >> 32));
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < row::kVector; ++i) {
    kept |= uint32_t((drawn[i / 4].words[i % 4] >> 1) >= threshold) << i;
  }
  return kept;
}

template <class Element>
static __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    zero_at_random(const __grid_constant__ DropoutArguments in, int64_t vectors, float scale,
                   uint32_t threshold) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto* const x = static_cast<const uint4*>(in.x);
  auto* const y = static_cast<uint4*>(in.y);
  auto* const mask = static_cast<uint8_t*>(in.mask);
  const int64_t seed = in.random[0], offset = in.random[1];
  uint4 loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = first_vector() + v * kThreads;
    if (vector < vectors) loaded[v] = __ldg(x + vector);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = first_vector() + v * kThreads;
    if (vector >= vectors) return;
    const uint32_t kept = kept_bits(vector, seed, offset, threshold);
    y[vector] = scaled<Element>(loaded[v], kept, scale);
    if (mask != nullptr) mask[vector] = uint8_t(kept);
  }
}

}  // namespace dropout

template <class Element>
static Status launch_dropout(const DropoutArguments& in, Stream& stream) {
  return dropout::launch_vectors("cudaLaunchKernelEx(dropout)", &dropout::zero_at_random<Element>,
                                 in, stream, dropout::scale_of(in.p),
                                 dropout::threshold_of(in.p));
}

}  // namespace fusegen
