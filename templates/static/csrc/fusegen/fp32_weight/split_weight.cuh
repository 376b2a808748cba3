// A weight in fp32 as parts in 16 bits; a thread has 8 numbers, two loads of 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/fp32_weight/fp32_weight.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace fp32_weight {

template <class Element>
static __global__ void __launch_bounds__(kFp32WeightThreads)
    split(const __grid_constant__ SplitWeightArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t first = (int64_t(blockIdx.x) * kFp32WeightThreads + threadIdx.x) * row::kVector;
  const int64_t count = in.n * in.k;
  if (first >= count) return;
  const auto* const from = reinterpret_cast<const float4*>(in.weight + first);
  const float4 low = __ldg(from), high = __ldg(from + 1);
  float left[row::kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int part = 0; part < kWeightParts; ++part) {
    const uint4 packed = row::pack<Element>(left);
    *reinterpret_cast<uint4*>(static_cast<Element*>(in.parts) + part * count + first) = packed;
    float rounded[row::kVector];
    row::unpack<Element>(packed, rounded);
#pragma unroll
    for (int i = 0; i < row::kVector; ++i) left[i] = (left[i] - rounded[i]) * kPartScale;
  }
}

}  // namespace fp32_weight

template <class Element>
static Status launch_split_weight(const SplitWeightArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.k % kRowAlignment != 0) return {kInvalid, "k: a multiple of 8"};
  const int64_t blocks = ceil_div(in.n * in.k, kFp32WeightThreads * row::kVector);
  if (blocks > INT32_MAX) return {kInvalid, "split_weight: fewer than 2^42 elements"};
  if (blocks == 0) return {};
  const Grid grid{dim3(unsigned(blocks)), kFp32WeightThreads};
  return launch_kernel("cudaLaunchKernelEx(split_weight)", &fp32_weight::split<Element>, grid,
                       stream, in);
}

}  // namespace fusegen
