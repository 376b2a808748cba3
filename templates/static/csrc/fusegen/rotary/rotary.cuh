// Rotary embeddings of all heads of a row.
#pragma once

#include <cstdint>

#include "fusegen/rotary/heads.cuh"
#include "fusegen/rotary/rotary.h"

namespace fusegen {

template <class Element>
static Status launch_rotary(const RotaryArguments& in, Stream& stream) {
  using namespace rotary;
  const Status status = check_sizes(in.rows, in.columns, in.pairs);
  if (!status.ok()) return status;
  const int64_t vectors = in.columns / row::kVector, heads = in.columns / (2 * in.pairs);
  const Rotation<Row<const uint4>, Row<uint4>> rotation{
      {static_cast<const uint4*>(in.x), vectors},
      {static_cast<uint4*>(in.y), vectors},
      {in.cos, in.sin, in.kind},
      in.rows, heads, in.pairs};
  return launch_rotation<Element>("cudaLaunchKernelEx(rotary)", rotation, in.interleaved, stream);
}

}  // namespace fusegen
