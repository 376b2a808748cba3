// y = softmax(scale * x + bias) of each row, without what is left out.
//
// Rows of up to 16384 elements are read once and stay in registers, as fp32: a warp has up to 1024
// elements, a CTA of 64 threads twice that, and so on, one of 512 the longest. Longer rows are read
// twice, by 512 threads: each keeps the largest score it has seen and the sum of
// exponentials less that, and rescales the sum when a larger one comes. Orders are fixed, so results repeat bit for
// bit. A row of which all scores are -inf gives zeros; NaN, or +inf, makes all of its row NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/launch/architecture.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/exponential.cuh"
#include "fusegen/softmax/limits.cuh"
#include "fusegen/softmax/running_sum.cuh"
#include "fusegen/softmax/scores.cuh"
#include "fusegen/softmax/softmax.h"

namespace fusegen {

namespace softmax {

inline constexpr int kVectors = 4;  // 16 bytes each, that a thread has at once

// 1 over the sum of exponentials; 0 where none is left, so that all of its row is 0.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Vectors `first`, `first + step`, ... of y, as far as the row has them.
template <class Element, int kVectors>
__device__ __forceinline__ void store(uint4* y, const float (&values)[kVectors][kVector],
                                      int first, int step, int count) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first + v * step < count) y[first + v * step] = row::pack<Element>(values[v]);
  }
}

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, Team::kCtasPerSm)
    rows_in_registers(const __grid_constant__ SoftmaxArguments in, int64_t rows) {
  __shared__ typename Team::Partial of_largest, of_sum;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = Team::index();
  if (index >= rows) return;
  float values[kVectors][kVector];
  load_scores<Element>(values, ScoreRow::of<Element>(in, index), Team::thread(), Team::kSize);
  const float shift = shift_of(Team::reduce(largest_of(values), row::Max(), of_largest));
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (float& value : values[v]) sum += value = exponential(value, shift);
  }
  const float inverse = inverse_of(Team::reduce(sum, row::Sum(), of_sum));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (float& value : values[v]) value *= inverse;
  }
  auto* const y = reinterpret_cast<uint4*>(static_cast<Element*>(in.y) + index * in.columns);
  store<Element>(y, values, Team::thread(), Team::kSize, int(in.columns) / kVector);
}

// The compiler wants more registers for sm_89 than two of these CTAs leave to a thread.
template <class Team>
inline constexpr int kLongRowCtas = kLeastArchitecture == 890 ? 1 : Team::kCtasPerSm;

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, kLongRowCtas<Team>)
    rows_read_twice(const __grid_constant__ SoftmaxArguments in, int64_t rows) {
  __shared__ typename Team::Partial of_largest, of_sum;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = Team::index();
  if (index >= rows) return;
  const ScoreRow row = ScoreRow::of<Element>(in, index);
  const int count = int(in.columns) / kVector;
  float values[kVectors][kVector];
  RunningSum own;
#pragma unroll 1
  for (int first = Team::thread(); row.has(first); first += kVectors * Team::kSize) {
    load_scores<Element>(values, row, first, Team::kSize);
    own.add(values);
  }
  const float largest = Team::reduce(own.largest, row::Max(), of_largest);
  const float inverse = inverse_of(Team::reduce(own.sum_less(largest), row::Sum(), of_sum));
  auto* const y = reinterpret_cast<uint4*>(static_cast<Element*>(in.y) + index * in.columns);
#pragma unroll 1
  for (int first = Team::thread(); first < count; first += kVectors * Team::kSize) {
    load_scores<Element>(values, row, first, Team::kSize);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (float& value : values[v]) value = inverse * exponential(value, shift_of(largest));
    }
    store<Element>(y, values, first, Team::kSize, count);
  }
}

}  // namespace softmax

template <class Element>
static Status launch_softmax(const SoftmaxArguments& in, Stream& stream) {
  const int64_t rows = in.outer * in.heads * in.queries;
  return softmax::launch_rows<softmax::kVectors>(
      "cudaLaunchKernelEx(softmax)", in, rows, stream,
      [](auto team) { return &softmax::rows_in_registers<Element, decltype(team)>; },
      [](auto team) { return &softmax::rows_read_twice<Element, decltype(team)>; });
}

}  // namespace fusegen
