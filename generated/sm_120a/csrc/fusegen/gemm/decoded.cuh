// Host side of every GEMM of decoded operands: what its arguments must hold, and what its result is
// multiplied by at its end.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/visit/end_scales.cuh"
#include "fusegen/visit/group_amaxes.cuh"

namespace fusegen {

// The visitor of what is left for the end: amaxes of groups, or scales of either operand.
template <Gemm kind, EndScale of_a, EndScale of_b>
auto end_scales(const DecodedGemmArguments& in) {
  if constexpr (of_a == EndScale::none && of_b == EndScale::none) {
    return GroupAmaxes{in.amax_a, in.amax_b};
  } else {
    return EndScales<kind, of_a, of_b>{in.scale_a, in.scale_b, int32_t(in.gemm.n)};
  }
}

template <EndScale of_a, EndScale of_b>
Status check_arguments(const DecodedGemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (Status status = check_arguments(in.gemm); !status.ok()) return status;
  if ((in.amax_a == nullptr) != (in.amax_b == nullptr)) {
    return {kInvalid, "amax_a and amax_b, or neither"};
  }
  const auto agrees = [&](const float* scale, EndScale of) {
    // Scales of no tokens are a tensor without elements, whose address is null.
    return scale == nullptr ? of == EndScale::none || in.gemm.tokens == 0 : of != EndScale::none;
  };
  if (!agrees(in.scale_a, of_a)) return {kInvalid, "scale_a, unless a was decoded by its scales"};
  if (!agrees(in.scale_b, of_b)) return {kInvalid, "scale_b, unless b was decoded by its scales"};
  constexpr bool kScales = of_a != EndScale::none || of_b != EndScale::none;
  if (kScales && in.amax_a != nullptr) return {kInvalid, "amaxes, or scales at the end"};
  return {};
}

}  // namespace fusegen
