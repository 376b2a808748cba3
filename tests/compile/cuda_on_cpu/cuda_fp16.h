#pragma once

#include "cuda_runtime_api.h"

struct __half { uint16_t bits; };
struct __half2 { __half x, y; };

inline _Float16 on_cpu_number(__half value) {
  _Float16 number;
  std::memcpy(&number, &value.bits, sizeof number);
  return number;
}
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half value) { return float(on_cpu_number(value)); }
inline __half __float2half_rn(float value) {
  const _Float16 number = _Float16(value);
  __half result;
  std::memcpy(&result.bits, &number, sizeof number);
  return result;
}
inline float2 __half22float2(__half2 pair) {
  return {__half2float(pair.x), __half2float(pair.y)};
}
inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
  const float2 left = __half22float2(a), right = __half22float2(b);
  return __floats2half2_rn(left.x + right.x, left.y + right.y);
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  const auto larger = [](__half a, __half b) -> __half {
    const float value = on_cpu_max(__half2float(a), __half2float(b));
    return value != value ? __half{0x7FFF} : __float2half_rn(value);
  };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}
inline __half2 __habs2(__half2 a) {
  return {{uint16_t(a.x.bits & 0x7FFF)}, {uint16_t(a.y.bits & 0x7FFF)}};
}
inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  const auto larger = [](__half a, __half b) -> __half {
    if (__half2float(a) != __half2float(a) || __half2float(b) != __half2float(b)) return {0x7FFF};
    return __half2float(a) < __half2float(b) ? b : a;
  };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}
// Of products that are exact, which those of the kernels are.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto sum = [](__half a, __half b, __half c) -> __half {
    const float value = __half2float(a) * __half2float(b) + __half2float(c);
    return value != value ? __half{0x7FFF} : __float2half_rn(value);
  };
  return {sum(a.x, b.x, c.x), sum(a.y, b.y, c.y)};
}
