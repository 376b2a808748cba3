// What one launch that quantises several tensors is given; host side, no device code.
#pragma once

#include "fusegen/quantize/step.h"

namespace fusegen {

// Steps of one kernel that do not read what another one writes. None of them needs an amax first.
struct QuantizeSeveralArguments {
  static constexpr int kMost = 4;
  QuantizeStepArguments steps[kMost] = {};
  int count = 0;
};

// What a unit states of how many steps a launch takes, as the generator derived it.
template <class Stated>
constexpr bool agrees_parts() {
  static_assert(Stated::most_parts == QuantizeSeveralArguments::kMost,
                "most_parts: unit against several.h");
  return true;
}

}  // namespace fusegen
