// What a sum over the rows of each group is launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

struct GroupSumArguments {
  const void* input;           // [tokens, n]
  void* output;                // [groups, n]
  const int64_t* group_sizes;  // [groups] on the device; nullptr: one group of all rows
  int64_t tokens;
  int64_t groups;
  int64_t n;  // a multiple of 8
  const float* scales = nullptr;  // [tokens], which rows are multiplied by; nullptr: by none
};

}  // namespace fusegen
