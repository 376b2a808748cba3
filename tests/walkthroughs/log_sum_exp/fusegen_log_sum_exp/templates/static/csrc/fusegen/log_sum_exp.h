// What the logarithm of the sum of each row's exponentials, and its gradient, are launched with;
// host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

struct LogSumExpArguments {
  const void* x;  // [rows, columns]
  void* y;        // [rows]
  float* lse;     // [rows], the same before it is rounded; nullptr: not wanted
  int64_t rows;
  int64_t columns;  // a multiple of 8
};

// dx = dy exp(x - lse), rows of x times a factor of their own.
struct LogSumExpGradArguments {
  const void* dy;    // [rows]
  const void* x;     // [rows, columns]
  const float* lse;  // [rows]
  void* dx;          // [rows, columns]
  int64_t rows;
  int64_t columns;  // a multiple of 8
};

}  // namespace fusegen
