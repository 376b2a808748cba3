// What a kernel that quantises rows of tokens is launched with; host side, no device code.
#pragma once

#include "fusegen/quantize/step.h"
#include "fusegen/routing/gather_rows.h"

namespace fusegen {

struct GatherQuantizeArguments {
  GatherRowsArguments gather;  // its y is quantised, not written
  QuantizeStepArguments step;  // its input is that result
  bool quantizes = true;       // otherwise nothing is wanted
};

}  // namespace fusegen
