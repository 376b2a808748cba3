// A weight in fp32 as parts in 16 bits; a thread has 4 numbers, a load of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "fusegen/fp32_weight/fp32_weight.h"
#include "fusegen/launch/launch.cuh"

namespace fusegen {

namespace fp32_weight {

inline constexpr int kThreads = 256, kValues = 4;

template <class Element>
static __global__ void __launch_bounds__(kThreads)
    split(const __grid_constant__ SplitWeightArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kValues;
  const int64_t count = in.n * in.k;
  if (first >= count) return;
  const float4 four = __ldg(reinterpret_cast<const float4*>(in.weight + first));
  float left[kValues] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int part = 0; part < kWeightParts; ++part) {
    Element rounded[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      rounded[i] = Element(left[i]);
      left[i] = (left[i] - float(rounded[i])) * kPartScale;
    }
    uint2 packed;
    memcpy(&packed, rounded, sizeof packed);
    Element* const to = static_cast<Element*>(in.parts) + part * count + first;
    *reinterpret_cast<uint2*>(to) = packed;
  }
}

}  // namespace fp32_weight

template <class Element>
static Status launch_split_weight(const SplitWeightArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.k % kRowAlignment != 0) return {kInvalid, "k: a multiple of 8"};
  const int64_t blocks = ceil_div(in.n * in.k, fp32_weight::kThreads * fp32_weight::kValues);
  if (blocks > INT32_MAX) return {kInvalid, "split_weight: fewer than 2^41 elements"};
  if (blocks == 0) return {};
  const Grid grid{dim3(unsigned(blocks)), fp32_weight::kThreads};
  return launch_kernel("cudaLaunchKernelEx(split_weight)", &fp32_weight::split<Element>, grid,
                       stream, in);
}

}  // namespace fusegen
