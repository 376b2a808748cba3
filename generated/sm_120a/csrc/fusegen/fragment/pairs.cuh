// Two neighbours of a row as 16-bit values in one register: the one rounding of all results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusegen {

template <class Element>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};

__device__ inline uint32_t round_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline uint32_t round_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline float2 widen_pair(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline float2 widen_pair(__half2 pair) { return __half22float2(pair); }

// The sum of two pairs, rounded.
template <class Element>
__device__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  using Pair = typename PairOf<Element>::type;
  const Pair sum = __hadd2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(sum);
}

}  // namespace fusegen
