// dx = dy / (1 - p) where an element was kept, 0 elsewhere.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/dropout/dropout.h"
#include "fusegen/dropout/elements.cuh"

namespace fusegen {

namespace dropout {

template <class Element>
static __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gradient(const __grid_constant__ DropoutGradArguments in, int64_t vectors, float scale) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto* const dy = static_cast<const uint4*>(in.dy);
  const auto* const mask = static_cast<const uint8_t*>(in.mask);
  auto* const dx = static_cast<uint4*>(in.dx);
  uint4 loaded[kVectors];
  uint32_t kept[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = first_vector() + v * kThreads;
    if (vector >= vectors) break;
    loaded[v] = __ldg(dy + vector);
    kept[v] = __ldg(mask + vector);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t vector = first_vector() + v * kThreads;
    if (vector >= vectors) return;
    dx[vector] = scaled<Element>(loaded[v], kept[v], scale);
  }
}

}  // namespace dropout

template <class Element>
static Status launch_dropout_grad(const DropoutGradArguments& in, Stream& stream) {
  return dropout::launch_vectors("cudaLaunchKernelEx(dropout_grad)", &dropout::gradient<Element>,
                                 in, stream, dropout::scale_of(in.p));
}

}  // namespace fusegen
