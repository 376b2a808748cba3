// Arithmetic of the recipes on one element or one block: encoders, scales, random bits, Hadamard.
//
// Everything here compiles for the host too, so that the numbers a kernel stores can be checked
// without a GPU. It must be compiled without contraction and without flushing subnormals: scales
// reach down to 2^-127.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FUSEGEN_INLINE __host__ __device__ __forceinline__
#else
#define FUSEGEN_INLINE inline
#endif
#ifdef __CUDA_ARCH__
#define FUSEGEN_UNROLL _Pragma("unroll")
#else
#define FUSEGEN_UNROLL
#endif

namespace fusegen {

// Whether E2M1 and E8M0 have conversions in hardware, which are tied to an architecture or its family.
// They give what the software below gives, NaN and infinities included. Random bits are never the
// hardware's: a recipe says where they come from.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define FUSEGEN_NATIVE_CONVERSIONS 1
#else
#define FUSEGEN_NATIVE_CONVERSIONS 0
#endif

// ---- formats

// Sign, exponent, mantissa. `kLargest` is the code of the largest finite value; codes that follow
// it are not finite, and kNan is what NaN becomes, without its sign.
struct E4M3 {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kLargest = 0x7E, kNan = 0x7F;
};
struct E5M2 {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kLargest = 0x7B, kNan = 0x7F;
};
struct E2M1 {
  static constexpr int kBits = 4, kMantissa = 1, kBias = 1;
  static constexpr float kMax = 6.0f;
  static constexpr uint32_t kLargest = 0x7, kNan = 0x7;
};

// An exponent alone, 2^(code - 127): scales of MX blocks.
struct E8M0 {
  static constexpr int kBits = 8;
};

inline constexpr float kFloatMax = 3.40282346638528859812e+38f;
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

FUSEGEN_INLINE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

FUSEGEN_INLINE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

FUSEGEN_INLINE bool is_finite(float value) {
  return (bits_of(value) & kInfinityBits) != kInfinityBits;
}

// 2^exponent for -149 <= exponent <= 127.
FUSEGEN_INLINE float power_of_two(int exponent) {
  return float_of(exponent >= -126 ? uint32_t(exponent + 127) << 23 : 1u << (exponent + 149));
}

// Round to nearest even, saturated. Below the smallest normal value codes are equidistant: adding
// a power of two whose unit in the last place is that distance makes the fp32 adder round.
template <class Format>
FUSEGEN_INLINE uint32_t encode_in_software(float value) {
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr uint32_t kRebias = uint32_t(127 - Format::kBias) << Format::kMantissa;
  constexpr uint32_t kSmallestNormal = uint32_t(128 - Format::kBias) << 23;
  constexpr uint32_t kAdder = uint32_t(127 + 24 - Format::kBias - Format::kMantissa) << 23;
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kInfinityBits) return Format::kNan;
  const uint32_t sign = (bits >> 31) << (Format::kBits - 1);
  if (float_of(magnitude) >= Format::kMax) return sign | Format::kLargest;
  if (magnitude < kSmallestNormal) {
    return sign | (bits_of(float_of(magnitude) + float_of(kAdder)) - kAdder);
  }
  const uint32_t half = (1u << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1);
  return sign | (((magnitude + half) >> kDropped) - kRebias);
}

// Two codes, `low` in the low bits. The hardware converts pairs, to the same codes.
template <class Format>
FUSEGEN_INLINE uint32_t encode_pair(float low, float high) {
  return encode_in_software<Format>(low) | encode_in_software<Format>(high) << Format::kBits;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ uint32_t encode_pair<E4M3>(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
template <>
__device__ __forceinline__ uint32_t encode_pair<E5M2>(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#endif

template <class Format>
FUSEGEN_INLINE uint32_t encode(float value) {
  return encode_pair<Format>(value, 0.0f) & ((1u << Format::kBits) - 1);
}

template <class Format>
FUSEGEN_INLINE float decode(uint32_t code) {
  constexpr uint32_t kSign = 1u << (Format::kBits - 1);
  const uint32_t magnitude = code & (kSign - 1);
  const uint32_t sign = (code & kSign) << (32 - Format::kBits);
  if (magnitude > Format::kLargest) {
    const bool infinite = Format::kMantissa == 2 && magnitude == Format::kLargest + 1;
    return float_of(sign | kInfinityBits | (infinite ? 0u : 1u << 22));
  }
  // Read as fp32 bits the code has the wrong bias; a product with a power of two is exact.
  const float unbiased = float_of(magnitude << (23 - Format::kMantissa));
  return float_of(bits_of(unbiased * power_of_two(127 - Format::kBias)) | sign);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ float decode<E4M3>(uint32_t code) {
  uint32_t halves;
  float value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(code)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(uint16_t(halves)));
  return value;
}
#endif

// ---- E2M1 codes of many values

// a * b + c, where a * b is exact.
FUSEGEN_INLINE float add_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^-126 times a value that is not negative, rounded toward zero. Of one whose sign bit is set, any
// such.
FUSEGEN_INLINE float smallest_normals(float value) {
#ifdef __CUDA_ARCH__
  return __fmul_rz(value, power_of_two(-126));
#else
  const double product = double(value) * double(power_of_two(-126));
  const float rounded = float(product);
  return double(rounded) > product ? float_of(bits_of(rounded) - 1) : rounded;
#endif
}

FUSEGEN_INLINE uint32_t least_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Least of both pairs of 16 bits.
FUSEGEN_INLINE uint32_t least_of_pairs(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vminu2(a, b);
#else
  return least_of(a & 0xFFFF, b & 0xFFFF) | least_of(a >> 16, b >> 16) << 16;
#endif
}

// Four bytes of eight, those of `low` before those of `high`, by the nibbles of `selector`.
FUSEGEN_INLINE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t both = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 8) {
    result |= uint32_t(both >> ((selector >> (i / 2) & 7) * 8) & 0xFF) << i;
  }
  return result;
#endif
}

// Codes of E2M1 are 1/2 apart below 2, 1 up to 4 and 2 up to 6. The sum `fine` is rounded to halves, to
// nearest even; `coarse`, of half the magnitude, to wholes below 4, where it passes 2^23, and to twos above.
// Their bits count codes, so that the code is the lesser: the finer grid's where that one applies. NaN is
// more than either.
inline constexpr uint32_t kE2M1Surplus = 0x4AFFFFFAu;  // of a term over its code: the bits of 2^23 - 3

FUSEGEN_INLINE uint32_t nearest_e2m1_term(float magnitude) {
  const uint32_t fine = bits_of(magnitude + 8388605.0f);                      // 2^23 - 3
  const uint32_t coarse = bits_of(add_product(magnitude, 0.5f, 8388606.0f));  // 2^23 - 2
  return least_of(least_of(fine, coarse), kE2M1Surplus + E2M1::kLargest);
}

// Codes of `Count` magnitudes, the first in the lowest bits; bits above them may be any.
template <int Count>
FUSEGEN_INLINE uint32_t nearest_e2m1_in_software(const float* magnitudes) {
  static_assert(Count <= 8);
  constexpr uint32_t kAll = 0xFFFFFFFFu >> (32 - 4 * Count), kOnes = 0x11111111u & kAll;
  uint32_t sum = 0;
FUSEGEN_UNROLL
  for (int i = Count - 1; i >= 0; --i) sum = sum * 16 + nearest_e2m1_term(magnitudes[i]);
  return sum - (kE2M1Surplus * kOnes & kAll);
}

#if FUSEGEN_NATIVE_CONVERSIONS
// Of 8 magnitudes; NaN becomes the largest value.
__device__ __forceinline__ uint32_t nearest_e2m1_in_hardware(const float* magnitudes) {
  uint32_t codes;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}"
      : "=r"(codes)
      : "f"(magnitudes[0]), "f"(magnitudes[1]), "f"(magnitudes[2]), "f"(magnitudes[3]), "f"(magnitudes[4]),
        "f"(magnitudes[5]), "f"(magnitudes[6]), "f"(magnitudes[7]));
  return codes;
}
#endif

template <int Count>
FUSEGEN_INLINE uint32_t nearest_e2m1(const float* magnitudes) {
#if FUSEGEN_NATIVE_CONVERSIONS
  if constexpr (Count == 8) return nearest_e2m1_in_hardware(magnitudes);
#endif
  return nearest_e2m1_in_software<Count>(magnitudes);
}

// Rounds up with the probability of the position between two codes, to 1 / 256: a uniform part of
// a step is added, then the sum is cut off onto its own grid. Multiplied by 2^-126, where 1 is the
// smallest normal number, a code is the top of a float's bits, from bit 22 on: a step is 2^22 there.
//
// From 1 on the part may be added to the bits; below 1, where steps stay 1/2, a sum is rounded first.
// The larger of both is the one that applies: a part of the bits below 1 is less than one of 1/2, one
// of those above 2 more.
FUSEGEN_INLINE uint32_t stochastic_e2m1_bits(float magnitude, uint32_t random, int byte) {
  constexpr uint32_t kPart = 0xFFu << 14;  // of 2^22; a subnormal number, too, in units of 2^-135
  // Left shifts are products for the hardware, right ones share a pipe with masks.
  const uint32_t part = byte < 2 ? random << (14 - 8 * byte) & kPart
                                 : bytes_of(random, 0, 0x4404u | uint32_t(byte) << 4) << 6;
  const float below = add_product(float_of(part), power_of_two(126), magnitude);
  const uint32_t above = bits_of(magnitude) + part;
  const uint32_t sum = above > bits_of(below) ? above : bits_of(below);
  return bits_of(smallest_normals(float_of(sum)));
}

// Codes of 8 magnitudes, the first in the lowest bits; `random` are their bytes, in order.
FUSEGEN_INLINE uint32_t stochastic_e2m1(const float* magnitudes, const uint32_t* random) {
  uint32_t halves[2] = {};  // of even and of odd ones, a byte each
FUSEGEN_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    uint32_t pairs[2];
FUSEGEN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float* two = magnitudes + 4 * i + odd;
      const uint32_t pair = bytes_of(stochastic_e2m1_bits(two[0], random[i], odd),
                                     stochastic_e2m1_bits(two[2], random[i], odd + 2), 0x7632);
      pairs[i] = least_of_pairs(pair, 0x01FF01FFu) << 2;  // of NaN and of what is past 6 the last code
    }
    halves[odd] = bytes_of(pairs[0], pairs[1], 0x7531);
  }
  return halves[1] * 16 + halves[0];
}

// The same with signs, which are the top bits of 4 in `signs`, where all others may be any.
FUSEGEN_INLINE uint32_t with_signs(uint32_t codes, uint32_t signs) {
  return codes | (signs & 0x88888888u);
}

// fp32 -> bfloat16 -> fp32, nearest even; NaN becomes the positive one that the hardware gives.
FUSEGEN_INLINE float round_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > kInfinityBits) return float_of(0x7FFF0000u);
  return float_of((bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

// Two numbers in 16 bits each, `low` in the low ones. The hardware rounds pairs, to the same numbers.
FUSEGEN_INLINE uint32_t bfloat16_pair(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bits_of(round_to_bfloat16(low)) >> 16 | bits_of(round_to_bfloat16(high));
#endif
}

// ---- fp32 scales

// max / amax, where amax is raised to epsilon; 1 where amax is 0 or infinite. `largest` stands in
// for a quotient that overflows.
FUSEGEN_INLINE float scale_from_amax(float amax, float max, float epsilon, float largest,
                                     bool clear_mantissa) {
  const float raised = amax < epsilon ? epsilon : amax;
  if (raised == 0.0f || !is_finite(raised)) return 1.0f;
  const float quotient = max / raised;
  const float scale = is_finite(quotient) ? quotient : largest;
  return clear_mantissa ? float_of(bits_of(scale) & kInfinityBits) : scale;
}

// The scale after a step of delayed scaling; `margin` counts powers of two.
FUSEGEN_INLINE float delayed_scale(float amax, float old_scale, float max, int margin) {
  if (amax == 0.0f || !is_finite(amax)) return old_scale;
  const float scale = (max / amax) / power_of_two(margin);
  return is_finite(scale) ? scale : kFloatMax;
}

// ---- E8M0 scales: the code e stands for 2^(e - 127)

// Biased exponent of v, plus one where a mantissa bit is set. 0xFE is the last finite code; a
// subnormal of mantissa up to 2^-127 takes code 0, the scale 2^-127.
FUSEGEN_INLINE uint32_t e8m0_round_up_in_software(float v) {
  const uint32_t bits = bits_of(v) & 0x7FFFFFFFu;
  if (bits > kInfinityBits) return 0xFF;
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFFu;
  if (exponent >= 0xFE) return 0xFE;
  const bool raise = mantissa != 0 && !(exponent == 0 && mantissa <= 0x400000u);
  return exponent + raise;
}

#if FUSEGEN_NATIVE_CONVERSIONS
__device__ __forceinline__ uint32_t e8m0_round_up_in_hardware(float v) {
  uint16_t codes;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(fabsf(v)));
  return codes;
}
#endif

FUSEGEN_INLINE uint32_t e8m0_round_up(float v) {
#if FUSEGEN_NATIVE_CONVERSIONS
  return e8m0_round_up_in_hardware(v);
#else
  return e8m0_round_up_in_software(v);
#endif
}

// The OCP rule: the exponent of amax less that of the format's largest value; an infinite amax
// counts as 2^128.
template <class Format>
FUSEGEN_INLINE uint32_t e8m0_round_down(float amax) {
  constexpr int kLargestExponent = int(Format::kLargest >> Format::kMantissa) - Format::kBias;
  const int exponent = int((bits_of(amax) & 0x7FFFFFFFu) >> 23) - kLargestExponent;
  return uint32_t(exponent < 0 ? 0 : exponent);
}

// The multiplier of the block is e8m0_inverse(e) = 2^(127 - e), subnormal at 254 and 255.
FUSEGEN_INLINE float e8m0_inverse(uint32_t e) {
  return float_of(e < 254 ? (254u - e) << 23 : 0x800000u >> (e - 253));
}

// The code of 1 / factor, of a power of two that is a normal number.
FUSEGEN_INLINE uint32_t e8m0_of_inverse(float factor) { return 254u - (bits_of(factor) >> 23); }

FUSEGEN_INLINE float e8m0_value(uint32_t e) {
  if (e == 0xFF) return float_of(kInfinityBits | 1u << 22);
  return float_of(e == 0 ? 0x400000u : e << 23);
}

// ---- NVFP4 scales: one fp32 per tensor or group, one E4M3 per block

FUSEGEN_INLINE float nvfp4_tensor_scale(float amax) {
  if (amax == 0.0f || !is_finite(amax)) return 1.0f;
  const float scale = (E4M3::kMax * E2M1::kMax) / amax;
  return scale < kFloatMax ? scale : kFloatMax;
}

// The E4M3 code of a block's decoding scale.
FUSEGEN_INLINE uint32_t nvfp4_block_code(float block_amax, float tensor_scale) {
  return encode<E4M3>(block_amax * (tensor_scale * (1.0f / 6.0f)));
}

// What elements are multiplied with before they are encoded; `inverse` is 1 / tensor_scale.
FUSEGEN_INLINE float nvfp4_block_scale(uint32_t block_code, float inverse) {
  const float scale = 1.0f / (decode<E4M3>(block_code) * inverse);
  return scale < kFloatMax ? scale : kFloatMax;
}

// ---- random bits

struct PhiloxWords {
  uint32_t words[4];
};

FUSEGEN_INLINE uint32_t high_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return uint32_t((uint64_t(a) * b) >> 32);
#endif
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of several
// counters, which share the keys of the rounds.
template <int Count>
FUSEGEN_INLINE void philox(PhiloxWords (&counters)[Count], uint32_t key_low, uint32_t key_high) {
FUSEGEN_UNROLL
  for (int round = 0; round < 10; ++round) {
FUSEGEN_UNROLL
    for (int i = 0; i < Count; ++i) {
      uint32_t* c = counters[i].words;
      const uint32_t low0 = c[0] * 0xD2511F53u, high0 = high_product(c[0], 0xD2511F53u);
      const uint32_t low1 = c[2] * 0xCD9E8D57u, high1 = high_product(c[2], 0xCD9E8D57u);
      c[0] = high1 ^ c[1] ^ key_low;
      c[2] = high0 ^ c[3] ^ key_high;
      c[1] = low1;
      c[3] = low0;
    }
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
}

// ---- Hadamard

inline constexpr int kHadamard = 16;

// values <- (values * signs / 4) H, H of order 16 in Sylvester order. The order of the butterflies is part of the
// result. Quarters of 16-bit numbers are exact. Sums of up to four quarters are finite, and where one of eight is
// not, so is at least one of the two results that it goes into: whatever overflows shows in the amax as infinity.
FUSEGEN_INLINE void butterflies(float (&values)[kHadamard]) {
  constexpr uint32_t kNegative = 0xD7E8;  // + + + - + - - - - - - + - + - -, bit i set: minus
FUSEGEN_UNROLL
  for (int i = 0; i < kHadamard; i += 2) {
    const float a = values[i] * (kNegative >> i & 1 ? -0.25f : 0.25f), b = values[i + 1];
    const float quarter = kNegative >> (i + 1) & 1 ? -0.25f : 0.25f;
    values[i] = add_product(b, quarter, a);
    values[i + 1] = add_product(b, -quarter, a);
  }
FUSEGEN_UNROLL
  for (int stride = 2; stride < kHadamard; stride *= 2) {
FUSEGEN_UNROLL
    for (int i = 0; i < kHadamard; ++i) {
      if (i & stride) continue;
      const float a = values[i], b = values[i + stride];
      values[i] = a + b;
      values[i + stride] = a - b;
    }
  }
}

// values <- round_bf16((values * signs / 4) H)
FUSEGEN_INLINE void hadamard(float (&values)[kHadamard]) {
  butterflies(values);
FUSEGEN_UNROLL
  for (float& value : values) value = round_to_bfloat16(value);
}

// The same; `pairs` are in 16 bits, two to a word.
FUSEGEN_INLINE void hadamard(float (&values)[kHadamard], uint32_t (&pairs)[kHadamard / 2]) {
  butterflies(values);
FUSEGEN_UNROLL
  for (int i = 0; i < kHadamard; i += 2) {
    const uint32_t pair = bfloat16_pair(values[i], values[i + 1]);
    values[i] = float_of(pair << 16);
    values[i + 1] = float_of(pair & 0xFFFF0000u);
    pairs[i / 2] = pair;
  }
}

}  // namespace fusegen

#undef FUSEGEN_INLINE
#undef FUSEGEN_UNROLL
#undef FUSEGEN_NATIVE_CONVERSIONS
