// Delayed scaling by amaxes that come from elsewhere, such as from a reduction over ranks.
#pragma once

#include "fusegen/quantize/state.cuh"
#include "fusegen/quantize/update_scale.h"

namespace fusegen {

// The amax goes to slot 0, which is empty between steps; then the state moves on as it does after a
// step that raised the slot itself. The states of a call move on together. Nothing of it depends on
// the module's own type.
template <class Element>
Status launch_update_scale(const UpdateScaleArguments& in, Stream& stream) {
  DelayedArguments& due = *in.due;
  if (in.update) {
    const size_t bytes = size_t(in.state.groups) * sizeof(float);
    const Status status = copy_memory(in.state.history, in.amax, bytes, stream);
    if (!status.ok()) return status;
    due.states[due.count++] = in.state;
  }
  if (!in.moves_states && due.count < DelayedArguments::kMost) return {};
  const Status status = launch_delayed(due, stream);
  due.count = 0;
  return status;
}

}  // namespace fusegen
