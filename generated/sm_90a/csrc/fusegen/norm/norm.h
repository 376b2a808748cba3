// What norms of rows are launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/norm/kind.h"

namespace fusegen {

// y = (x - mean) rstd weight + bias, with the mean of a layer norm alone.
struct NormArguments {
  const void* x;       // [rows, columns]
  const void* weight;  // [columns]; nullptr: ones
  const void* bias;    // [columns]; nullptr: zeros
  void* y;             // [rows, columns]
  float* mean;         // [rows]; nullptr: not wanted
  float* rstd;         // [rows]; nullptr: not wanted
  int64_t rows;
  int64_t columns;     // a multiple of 8
  float eps;
  bool zero_centered;  // whether 1 is added to the weight
  NormKind kind;
};

}  // namespace fusegen
