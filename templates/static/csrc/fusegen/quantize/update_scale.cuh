// Delayed scaling by amaxes that come from elsewhere, such as from a reduction over ranks.
#pragma once

#include "fusegen/quantize/state.cuh"
#include "fusegen/quantize/update_scale.h"

namespace fusegen {

// The state moves on as it does after a step that raised its slot 0. Nothing of it depends on the
// module's own type.
template <class Element>
Status launch_update_scale(const UpdateScaleArguments& in, Stream& stream) {
  return move_state(in, stream);
}

}  // namespace fusegen
