// What a kernel that quantises an expression is launched with; host side, no device code.
#pragma once

#include "fusegen/pointwise/pointwise.h"
#include "fusegen/quantize/step.h"

namespace fusegen {

struct PointwiseQuantizeArguments {
  PointwiseArguments expression;  // one result is quantised, not written; another one summed over rows
  QuantizeStepArguments step;     // its input is that result
  float* row_partials = nullptr;  // workspace [ceil(expression.columns / 128), rows] of the sum
  bool quantizes = true;          // otherwise the sum alone is wanted
};

}  // namespace fusegen
