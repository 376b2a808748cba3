// Packed rows to queries and keys, rotated, and to values.
#pragma once

#include <cuda_runtime_api.h>

#include "fusegen/rotary/qkv_heads.cuh"
#include "fusegen/rotary/rotary_qkv.h"

namespace fusegen {

template <class Element>
static Status launch_rotary_qkv(const RotaryQkvArguments& in, Stream& stream) {
  using namespace rotary;
  const Status status = check_qkv(in);
  if (!status.ok()) return status;
  const Row<const uint4> from{static_cast<const uint4*>(in.x), in.columns / row::kVector};
  return launch_qkv<Element>("cudaLaunchKernelEx(rotary_qkv)", in, from, parts_of<uint4>(in),
                             RotaryDirection::forward, stream);
}

}  // namespace fusegen
