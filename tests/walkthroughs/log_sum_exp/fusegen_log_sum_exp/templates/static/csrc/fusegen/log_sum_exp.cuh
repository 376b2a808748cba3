// lse[t] = log(sum of exp(x[t, c])), and dx[t, c] = dy[t] exp(x[t, c] - lse[t]).
//
// One warp a row, 16 bytes a lane.  The largest element is found first and subtracted, so that no
// exponential overflows; the second read of a row comes from L2.  A butterfly adds the lanes'
// sums in a fixed order, so results repeat bit for bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/log_sum_exp.h"

namespace fusegen {

namespace log_sum_exp {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kVector = kRowAlignment;  // elements in 16 bytes
inline constexpr int64_t kRows = kThreads / kWarp;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }

__device__ inline int64_t row_of_warp() { return blockIdx.x * kRows + threadIdx.x / kWarp; }

// `visit(vector, column)` is called with every 16 bytes of a row that are this lane's.
template <class Visit>
__device__ void for_each_vector(const void* row, int64_t columns, const Visit& visit) {
  const auto* vectors = static_cast<const uint4*>(row);
  const int64_t count = columns / kVector;
  for (int64_t i = threadIdx.x % kWarp; i < count; i += kWarp) visit(__ldg(vectors + i), i);
}

template <class Element>
static __global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ LogSumExpArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const Element* const x = static_cast<const Element*>(in.x) + row * in.columns;

  float largest = -INFINITY;
  for_each_vector(x, in.columns, [&](const uint4& vector, int64_t) {
    const auto* elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, widen(elements[i]));
  });
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  const float shift = fabsf(largest) == INFINITY ? 0.0f : largest;  // inf - inf is NaN

  float sum = 0.0f;
  for_each_vector(x, in.columns, [&](const uint4& vector, int64_t) {
    const auto* elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += expf(widen(elements[i]) - shift);
  });
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (threadIdx.x % kWarp != 0) return;
  const float lse = shift + logf(sum);
  narrow(lse, static_cast<Element*>(in.y) + row);
  if (in.lse != nullptr) in.lse[row] = lse;
}

template <class Element>
static __global__ void __launch_bounds__(kThreads)
    backward(const __grid_constant__ LogSumExpGradArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const float factor = widen(static_cast<const Element*>(in.dy)[row]);
  const float lse = in.lse[row];
  const Element* const x = static_cast<const Element*>(in.x) + row * in.columns;
  auto* const dx = reinterpret_cast<uint4*>(static_cast<Element*>(in.dx) + row * in.columns);
  for_each_vector(x, in.columns, [&](const uint4& vector, int64_t at) {
    uint4 result;
    const auto* elements = reinterpret_cast<const Element*>(&vector);
    auto* const results = reinterpret_cast<Element*>(&result);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      narrow(factor * expf(widen(elements[i]) - lse), results + i);
    }
    dx[at] = result;
  });
}

inline Status check_rows(int64_t rows, int64_t columns) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (rows < 0 || rows > INT32_MAX) return {kInvalid, "0 <= rows < 2^31"};
  if (columns < kRowAlignment || columns % kRowAlignment != 0) {
    return {kInvalid, "columns: a multiple of 8"};
  }
  return {};
}

inline Grid grid_of(int64_t rows) {
  return Grid{dim3(unsigned((rows + kRows - 1) / kRows)), kThreads};
}

}  // namespace log_sum_exp

template <class Element>
static Status launch_log_sum_exp(const LogSumExpArguments& in, Stream& stream) {
  const Status status = log_sum_exp::check_rows(in.rows, in.columns);
  if (!status.ok() || in.rows == 0) return status;
  return launch_kernel("cudaLaunchKernelEx(log_sum_exp)", &log_sum_exp::forward<Element>,
                       log_sum_exp::grid_of(in.rows), stream, in);
}

template <class Element>
static Status launch_log_sum_exp_grad(const LogSumExpGradArguments& in, Stream& stream) {
  const Status status = log_sum_exp::check_rows(in.rows, in.columns);
  if (!status.ok() || in.rows == 0) return status;
  return launch_kernel("cudaLaunchKernelEx(log_sum_exp_grad)", &log_sum_exp::backward<Element>,
                       log_sum_exp::grid_of(in.rows), stream, in);
}

}  // namespace fusegen
