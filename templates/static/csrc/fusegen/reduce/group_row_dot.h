// What dot products of rows with a vector of their group are launched with; host side, no device
// code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

struct GroupRowDotArguments {
  const void* input;           // [tokens, n]
  const void* vectors;         // [groups, n]; nullptr: zeros
  const float* add;            // [tokens], what the results are added to; nullptr: nothing
  void* output;                // [tokens], fp32
  const int64_t* group_sizes;  // [groups] on the device; nullptr: one group of all rows
  int64_t tokens;
  int64_t groups;
  int64_t n;  // a multiple of 8
};

}  // namespace fusegen
