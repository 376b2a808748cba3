// What norms of sums of two tensors are launched with; host side, no device code.
#pragma once

#include "fusegen/norm/norm.h"

namespace fusegen {

// The norm of total = x + add, which is rounded before.
struct AddNormArguments {
  NormArguments norm;
  const void* add;  // [rows, columns]
  void* total;      // [rows, columns]; nullptr: not wanted
};

}  // namespace fusegen
