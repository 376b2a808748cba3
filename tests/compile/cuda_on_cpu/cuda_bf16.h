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
inline __nv_bfloat16 on_cpu_max(__nv_bfloat16 a, __nv_bfloat16 b) {
  return {uint16_t(__float_as_uint(std::fmax(__bfloat162float(a), __bfloat162float(b))) >> 16)};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {on_cpu_max(a.x, b.x), on_cpu_max(a.y, b.y)};
}
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) {
  return {{uint16_t(a.x.bits & 0x7FFF)}, {uint16_t(a.y.bits & 0x7FFF)}};
}
