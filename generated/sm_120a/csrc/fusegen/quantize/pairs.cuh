// Pairs of 16-bit elements in one register: maxima, magnitudes, numbers and signs of both at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fusegen {

namespace quantizing {

template <class Pair>
__device__ __forceinline__ Pair pair_of(uint32_t bits) {
  Pair pair;
  static_assert(sizeof pair == sizeof bits);
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}
template <class Pair>
__device__ __forceinline__ uint32_t bits(const Pair& pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

template <class Element>
__device__ __forceinline__ uint32_t maximum(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t maximum<__nv_bfloat16>(uint32_t a, uint32_t b) {
  return bits(__hmax2(pair_of<__nv_bfloat162>(a), pair_of<__nv_bfloat162>(b)));
}
template <>
__device__ __forceinline__ uint32_t maximum<__half>(uint32_t a, uint32_t b) {
  return bits(__hmax2(pair_of<__half2>(a), pair_of<__half2>(b)));
}

// Of pairs that have a NaN, or a NaN for either half that has one.
template <class Element>
__device__ __forceinline__ uint32_t maximum_or_nan(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t maximum_or_nan<__nv_bfloat16>(uint32_t a, uint32_t b) {
  return bits(__hmax2_nan(pair_of<__nv_bfloat162>(a), pair_of<__nv_bfloat162>(b)));
}
template <>
__device__ __forceinline__ uint32_t maximum_or_nan<__half>(uint32_t a, uint32_t b) {
  return bits(__hmax2_nan(pair_of<__half2>(a), pair_of<__half2>(b)));
}

// |pair|, NaN and all; the next maximum with a number drops NaN.
template <class Element>
__device__ __forceinline__ uint32_t magnitude(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t magnitude<__nv_bfloat16>(uint32_t pair) {
  return bits(__habs2(pair_of<__nv_bfloat162>(pair)));
}
template <>
__device__ __forceinline__ uint32_t magnitude<__half>(uint32_t pair) {
  return bits(__habs2(pair_of<__half2>(pair)));
}

// The larger of two magnitudes; NaN of two, or of either if `kNan`.
template <class Element, bool kNan>
__device__ __forceinline__ uint32_t larger_of_magnitudes(uint32_t a, uint32_t b) {
  return kNan ? maximum_or_nan<Element>(a, b) : maximum<Element>(a, b);
}

// What `larger_magnitude` compares of a pair, and the larger of two such, which is another: a magnitude
// with a sign that means nothing. From sm_86 on one instruction does both; before, signs go first, once for
// each pair.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
template <class Element>
__device__ __forceinline__ uint32_t comparable(uint32_t pair) {
  return pair;
}

template <class Element, bool kNan = false>
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<Element, __half>) {
    if constexpr (kNan) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    } else {
      asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    }
  } else {
    if constexpr (kNan) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    } else {
      asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    }
  }
  return larger;
}
#else
template <class Element>
__device__ __forceinline__ uint32_t comparable(uint32_t pair) {
  return magnitude<Element>(pair);
}

template <class Element, bool kNan = false>
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t a, uint32_t b) {
  return larger_of_magnitudes<Element, kNan>(a, b);
}
#endif

// The magnitude of what comparisons have left, 0 of NaN.
template <class Element>
__device__ __forceinline__ uint32_t amax_of(uint32_t largest) {
  return maximum<Element>(magnitude<Element>(largest), 0);
}

template <class Element>
__device__ __forceinline__ float widen_low(uint32_t pair);
template <class Element>
__device__ __forceinline__ float widen_high(uint32_t pair);
template <>
__device__ __forceinline__ float widen_low<__nv_bfloat16>(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
template <>
__device__ __forceinline__ float widen_high<__nv_bfloat16>(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
template <>
__device__ __forceinline__ float widen_low<__half>(uint32_t pair) {
  return __half2float(__ushort_as_half(uint16_t(pair)));
}
template <>
__device__ __forceinline__ float widen_high<__half>(uint32_t pair) {
  return __half2float(__ushort_as_half(uint16_t(pair >> 16)));
}

template <class Element>
__device__ __forceinline__ float widen(uint32_t pair, bool high) {
  return high ? widen_high<Element>(pair) : widen_low<Element>(pair);
}

// The same numbers; NaN becomes the positive one.
template <class Element>
__device__ __forceinline__ uint32_t quiet(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t quiet<__nv_bfloat16>(uint32_t pair) {
  return bits(__hfma2(pair_of<__nv_bfloat162>(pair), pair_of<__nv_bfloat162>(0x3F803F80u),
                      pair_of<__nv_bfloat162>(0x80008000u)));
}
template <>
__device__ __forceinline__ uint32_t quiet<__half>(uint32_t pair) {
  return bits(__hfma2(pair_of<__half2>(pair), pair_of<__half2>(0x3C003C00u),
                      pair_of<__half2>(0x80008000u)));
}

// ---- signs of pairs

// Bytes of ones for negative elements of two pairs, else of zeros: both low ones, then both high ones.
__device__ __forceinline__ uint32_t sign_bytes(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, 0xFBD9;" : "=r"(bytes) : "r"(a), "r"(b));
  return bytes;
#else
  return (a >> 15 & 1) * 0xFFu | (b >> 15 & 1) * 0xFF00u | (a >> 31) * 0xFF0000u | (b >> 31) * 0xFF000000u;
#endif
}

// Low nibbles of `even`, high ones of `odd`.
__device__ __forceinline__ uint32_t nibbles_of(uint32_t even, uint32_t odd) {
  return (even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
}

// Nibbles of ones for negative elements of four pairs, in order.
__device__ __forceinline__ uint32_t signs_along(const uint32_t (&pairs)[4]) {
  const uint32_t first = sign_bytes(pairs[0], pairs[1]), last = sign_bytes(pairs[2], pairs[3]);
  return nibbles_of(__byte_perm(first, last, 0x5410), __byte_perm(first, last, 0x7632));
}

}  // namespace quantizing

}  // namespace fusegen
