// What a pointwise kernel is launched with; host side, no device code.
#pragma once

#include <array>
#include <cstdint>

#include "fusegen/common/status.h"

namespace fusegen {

// Operands and results in the order in which the kernel declares them; a null result is not written.
struct PointwiseArguments {
  std::array<const void*, 8> operands;
  std::array<void*, 8> results;
  std::array<float, 8> scalars;
  int64_t rows;
  int64_t columns;  // elements of a row of one half, where operands have halves
  const int64_t* group_sizes = nullptr;  // [groups] on the device, of kernels of rows in groups
  int64_t groups = 0;
  bool clears = true;  // rows past the groups; otherwise they stay as they are
};

}  // namespace fusegen
