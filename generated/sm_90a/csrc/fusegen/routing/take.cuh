// Numbers at the places that a map names, 0 where it names none.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/routing/take.h"

namespace fusegen {

namespace routing {

inline constexpr int kTakeThreads = 256;

static __global__ void __launch_bounds__(kTakeThreads)
    take(const __grid_constant__ TakeArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t element = int64_t(blockIdx.x) * kTakeThreads + threadIdx.x;
  if (element >= in.elements) return;
  const int32_t place = __ldg(static_cast<const int32_t*>(in.index) + element);
  in.out[element] = place >= 0 && place < in.sources ? __ldg(in.from + place) : 0.0f;
}

}  // namespace routing

// Of whatever element type: the numbers are fp32.
template <class Element>
static Status launch_take(const TakeArguments& in, Stream& stream) {
  if (in.elements == 0) return {};
  const int64_t blocks = ceil_div(in.elements, routing::kTakeThreads);
  if (blocks > INT32_MAX) return {cudaErrorInvalidValue, "take: fewer than 2^39 elements"};
  const Grid grid{dim3(unsigned(blocks)), routing::kTakeThreads};
  return launch_kernel("cudaLaunchKernelEx(take)", &routing::take, grid, stream, in);
}

}  // namespace fusegen
