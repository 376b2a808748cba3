// What a kernel that quantises a norm of rows is launched with; host side, no device code.
#pragma once

#include "fusegen/norm/norm.h"
#include "fusegen/quantize/step.h"

namespace fusegen {

struct NormQuantizeArguments {
  NormArguments norm;          // its y is quantised, not written
  QuantizeStepArguments step;  // its input is that result
  float* statistics = nullptr; // workspace [2, norm.rows]: mean and rstd, where they are no results
  bool quantizes = true;       // otherwise statistics alone are wanted
};

}  // namespace fusegen
