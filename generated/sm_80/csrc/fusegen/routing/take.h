// What taking numbers by a map is launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/common/status.h"

namespace fusegen {

// out[i] = from[index[i]], 0 where index[i] is no place.
struct TakeArguments {
  const float* from;  // [sources]
  const void* index;  // int32 [elements]
  float* out;         // [elements]
  int64_t elements;
  int64_t sources;
};

}  // namespace fusegen
