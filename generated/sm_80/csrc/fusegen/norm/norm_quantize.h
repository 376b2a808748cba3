// What a kernel that quantises a norm of rows is launched with; host side, no device code.
#pragma once

#include "fusegen/norm/norm.h"
#include "fusegen/quantize/step.h"

namespace fusegen {

struct NormQuantizeArguments {
  NormArguments norm;          // its y is quantised, not written
  QuantizeStepArguments step;  // its input is that result
  // Workspace: mean and rstd [2, norm.rows], where they are no results, and a word for each band of
  // 128 rows, norm.rows / 128 + 1 of them.
  float* statistics = nullptr;
  bool quantizes = true;       // otherwise statistics alone are wanted
};

}  // namespace fusegen
