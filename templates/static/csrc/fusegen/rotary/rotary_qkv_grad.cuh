// Gradients of queries and keys, rotated back, and those of values, to packed rows.
#pragma once

#include <cuda_runtime_api.h>

#include "fusegen/rotary/qkv_heads.cuh"
#include "fusegen/rotary/rotary_qkv.h"

namespace fusegen {

template <class Element>
static Status launch_rotary_qkv_grad(const RotaryQkvGradArguments& in, Stream& stream) {
  using namespace rotary;
  const Status status = check_qkv(in);
  if (!status.ok()) return status;
  const Row<uint4> to{static_cast<uint4*>(in.dx), in.columns / row::kVector};
  return launch_qkv<Element>("cudaLaunchKernelEx(rotary_qkv_grad)", in, parts_of<const uint4>(in),
                             to, RotaryDirection::inverse, stream);
}

}  // namespace fusegen
