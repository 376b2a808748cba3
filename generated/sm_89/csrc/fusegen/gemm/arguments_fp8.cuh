// Host side of every FP8 GEMM: what its arguments must hold, and its scales that are constant along
// the contraction.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/visit/scales.cuh"

namespace fusegen {

template <Gemm kind>
Status check_fp8_arguments(const Fp8GemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const GemmArguments& g = in.gemm;
  if (Status status = check_arguments(g); !status.ok()) return status;
  const int64_t k = kind == Gemm::fprop   ? g.k
                        : kind == Gemm::dgrad ? g.n
                                              : stored_tokens(g);
  if (in.pitch_a < k || in.pitch_a % kPitch != 0) {
    return {kInvalid, "pitch_a: a multiple of 16, at least the contraction"};
  }
  if (in.pitch_b < k || in.pitch_b % kPitch != 0) {
    return {kInvalid, "pitch_b: a multiple of 16, at least the contraction"};
  }
  const bool has_scales = in.scale_a != nullptr && in.scale_b != nullptr;
  if (g.tokens > 0 && !has_scales) return {kInvalid, "scale_a and scale_b"};
  return {};
}

template <Gemm>
void set_scales(const Fp8GemmArguments& in, TensorScales* out) {
  *out = {in.scale_a, in.scale_b, in.scale_a_per_group, in.scale_b_per_group};
}

template <Gemm kind>
void set_scales(const Fp8GemmArguments& in, RowAndColumnScales<kind>* out) {
  *out = {in.scale_a, in.scale_b, int32_t(in.gemm.n)};
}

}  // namespace fusegen
