#pragma once

#include "cuda_runtime_api.h"

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(uint32_t(value.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return {0x7FFF};
  return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const float2 left = __bfloat1622float2(a), right = __bfloat1622float2(b);
  return __floats2bfloat162_rn(left.x + right.x, left.y + right.y);
}
inline __nv_bfloat16 on_cpu_max(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(on_cpu_max(__bfloat162float(a), __bfloat162float(b)));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {on_cpu_max(a.x, b.x), on_cpu_max(a.y, b.y)};
}
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) {
  return {{uint16_t(a.x.bits & 0x7FFF)}, {uint16_t(a.y.bits & 0x7FFF)}};
}
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  const auto larger = [](__nv_bfloat16 a, __nv_bfloat16 b) -> __nv_bfloat16 {
    if (__bfloat162float(a) != __bfloat162float(a) || __bfloat162float(b) != __bfloat162float(b)) return {0x7FFF};
    return __bfloat162float(a) < __bfloat162float(b) ? b : a;
  };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}
// Of products that are exact, which those of the kernels are.
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto sum = [](__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) -> __nv_bfloat16 {
    const float value = __bfloat162float(a) * __bfloat162float(b) + __bfloat162float(c);
    return value != value ? __nv_bfloat16{0x7FFF} : __float2bfloat16_rn(value);
  };
  return {sum(a.x, b.x, c.x), sum(a.y, b.y, c.y)};
}
