// The visitors of a GEMM.
#pragma once

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/bias.cuh"
#include "fusegen/visit/scaled_bias.cuh"
#include "fusegen/visit/visitors.cuh"

namespace fusegen {

// `scales`, then the bias, which fprop alone has.
template <Gemm kind, Store store, class Element, class... Scales>
__device__ auto gemm_visitors(const Bias<Element>& bias, const Shape& shape,
                              const Scales&... scales) {
  if constexpr (kind == Gemm::fprop) {
    const GroupBias<Element> values{bias.values, shape.groups, shape.n};
    if constexpr (store == Store::scaled_bias) {
      return VisitorArguments{scales..., AddScaledBias<Element>{values, bias.row_scales}};
    } else {
      return VisitorArguments{scales..., AddBias<Element>{values}};
    }
  } else {
    return VisitorArguments{scales...};
  }
}

}  // namespace fusegen
