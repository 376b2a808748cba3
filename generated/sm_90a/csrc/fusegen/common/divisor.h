// Division by a number that is known before a kernel starts.
#pragma once

#include <cstdint>

namespace fusegen {

// n / d for 0 <= n < 2^31 and 1 <= d < 2^31, without a division: n times ceil(2^p / d), shifted by
// p = 31 + ceil(log2 d). That multiplier is too large by less than d / 2^p of itself, so that the
// product is by less than n / 2^31 < 1 over 2^p of a quotient's remainder (Granlund and Montgomery,
// "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;

  explicit Divisor(uint32_t d) : shift(31) {
    while ((uint64_t(1) << (shift - 31)) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << shift) + d - 1) / d);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return uint32_t(uint64_t(n) * multiplier >> shift);
  }
};

}  // namespace fusegen
