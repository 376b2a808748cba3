// What gradients of norms of rows are launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/norm/kind.h"

namespace fusegen {

// Of the rows, at most: as many as a Hopper GPU has SMs, on every GPU, as results depend on it.
inline constexpr int64_t kNormParts = 132;

// With n = (x - mean) rstd and g = dy weight, and means over the row (sums, where rows have length
// one; the second one of a layer norm alone):
//   dx = rstd (g - n mean(g n) - mean(g)),  dweight = sum of dy n,  dbias = sum of dy.
// What else x was read for may have a gradient, too: it is added to dx, which is rounded before.
struct NormGradArguments {
  const void* x;       // [rows, columns]
  const void* dy;      // [rows, columns]
  const void* weight;  // [columns]; nullptr: ones
  const float* mean;   // [rows]; nullptr: zeros
  const float* rstd;   // [rows]
  const void* add;     // [rows, columns]; nullptr: zeros
  void* dx;            // [rows, columns]; nullptr: not wanted
  void* dweight;       // [columns]; nullptr: not wanted
  void* dbias;         // [columns]; nullptr: not wanted
  float* partials;     // [parts, sums that are wanted, columns]; nullptr: none are
  int64_t parts;       // kNormParts
  int64_t rows;
  int64_t columns;     // a multiple of 8
  bool zero_centered;  // whether 1 is added to the weight
  NormKind kind;
};

}  // namespace fusegen
