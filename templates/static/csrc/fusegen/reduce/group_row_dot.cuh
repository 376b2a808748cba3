// The logits of a gate, and the gradient of a scaled bias's scales: out[t] = add[t] + sum of a[t, c]
// b[g, c], where g is the row's group, or the only one.
//
// One warp a row: it finds the row's group by a scan over the sizes, 32 at a time, reads 16 bytes a
// lane and adds its lanes' sums by a butterfly. Every order is fixed, so results repeat bit for bit.
// Rows that no group has are not read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/reduce/group_row_dot.h"
#include "fusegen/launch/launch.cuh"

namespace fusegen {

namespace group_row_dot {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kVector = 8;  // elements in 16 bytes
inline constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }

// The group of a row, or `groups` for a row that none has. All lanes of a warp ask for the same row.
// Sizes are clamped before they are added, so that 65535 of them stay far from the end of int64.
__device__ inline int64_t group_of(int64_t row, const int64_t* group_sizes, int64_t tokens,
                                   int64_t groups, int lane) {
  if (group_sizes == nullptr) return 0;
  int64_t before = 0;  // rows of the groups before these 32
  for (int64_t first = 0; first < groups; first += kWarp) {
    const int64_t group = first + lane;
    const int64_t size = group < groups ? __ldg(group_sizes + group) : 0;
    int64_t end = max(int64_t(0), min(size, tokens));
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    end += before;
    const unsigned ended = __reduce_add_sync(kAllLanes, unsigned(end <= row));
    if (ended < kWarp) return first + int64_t(ended);
    before = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return groups;
}

template <class Element>
__device__ float dot(const uint4& a, const uint4& b, float sum) {
  const auto* left = reinterpret_cast<const Element*>(&a);
  const auto* right = reinterpret_cast<const Element*>(&b);
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += widen(left[i]) * widen(right[i]);
  return sum;
}

template <class Element>
static __global__ void __launch_bounds__(kThreads)
    kernel(const __grid_constant__ GroupRowDotArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= in.tokens) return;
  const int64_t group =
      in.vectors != nullptr ? group_of(row, in.group_sizes, in.tokens, in.groups, lane) : in.groups;
  float sum = 0.0f;
  if (group < in.groups) {
    const Element* const a = static_cast<const Element*>(in.input) + row * in.n;
    const Element* const b = static_cast<const Element*>(in.vectors) + group * in.n;
#pragma unroll 4
    for (int64_t column = lane * kVector; column < in.n; column += kWarp * kVector) {
      sum = dot<Element>(__ldg(reinterpret_cast<const uint4*>(a + column)),
                         __ldg(reinterpret_cast<const uint4*>(b + column)), sum);
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (lane != 0) return;
  static_cast<float*>(in.output)[row] = in.add != nullptr ? in.add[row] + sum : sum;
}

}  // namespace group_row_dot

template <class Element>
static Status launch_group_row_dot(const GroupRowDotArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  constexpr int64_t kRows = group_row_dot::kThreads / group_row_dot::kWarp;
  if (in.tokens < 0 || in.tokens > INT32_MAX) return {kInvalid, "0 <= tokens < 2^31"};
  if (in.groups < 1 || in.groups > 65535) return {kInvalid, "1 <= groups <= 65535"};
  if (in.n < kRowAlignment || in.n % kRowAlignment != 0) return {kInvalid, "n: a multiple of 8"};
  if (in.tokens == 0) return {};
  const Grid grid{dim3(unsigned((in.tokens + kRows - 1) / kRows)), group_row_dot::kThreads};
  return launch_kernel("cudaLaunchKernelEx(group_row_dot)", &group_row_dot::kernel<Element>, grid,
                       stream, in);
}

}  // namespace fusegen
