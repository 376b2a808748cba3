// What a step that moves the state of delayed scaling on is launched with; host side.
#pragma once

#include "fusegen/quantize/quantize.h"

namespace fusegen {

// State is changed where `update` says so.
struct UpdateScaleArguments {
  DelayedState state = {};          // with the amaxes of all ranks
  DelayedArguments* due = nullptr;  // states that a call moves on
  bool moves_states = false;        // whether those that are due by now move on after this step
  bool update = false;              // whether this step's state moves on
};

}  // namespace fusegen
