// dx = scale * y * (dy - sum of dy y), y the softmax of a row; the sum is of the whole row.
//
// Rows of up to 16384 elements are read once and stay in registers, as they lie in memory; longer
// ones are read twice. Teams have twice as many threads as those of the softmax, because there are
// two operands. Every order is fixed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/limits.cuh"
#include "fusegen/softmax/softmax.h"

namespace fusegen {

namespace softmax {

inline constexpr int kGradVectors = 2;  // 16 bytes each of dy and of y, that a thread has at once

// A row of dy, y and dx.
template <class Element>
struct GradRow {
  const uint4* dy;
  const uint4* y;
  uint4* dx;
  int count;  // vectors

  __device__ GradRow(const SoftmaxGradArguments& in, int64_t index)
      : dy(reinterpret_cast<const uint4*>(static_cast<const Element*>(in.dy) + index * in.columns)),
        y(reinterpret_cast<const uint4*>(static_cast<const Element*>(in.y) + index * in.columns)),
        dx(reinterpret_cast<uint4*>(static_cast<Element*>(in.dx) + index * in.columns)),
        count(int(in.columns) / row::kVector) {}
};

// Vectors of dy and y; zeros past the row.
struct GradVectors {
  uint4 dy[kGradVectors], y[kGradVectors];

  template <class Row>
  __device__ __forceinline__ void load(const Row& row, int first, int step) {
#pragma unroll
    for (int v = 0; v < kGradVectors; ++v) {
      const bool inside = first + v * step < row.count;
      dy[v] = inside ? __ldg(row.dy + first + v * step) : uint4{};
      y[v] = inside ? __ldg(row.y + first + v * step) : uint4{};
    }
  }

  template <class Element>
  __device__ __forceinline__ float dot() const {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kGradVectors; ++v) {
      float gradients[row::kVector], values[row::kVector];
      row::unpack<Element>(dy[v], gradients);
      row::unpack<Element>(y[v], values);
#pragma unroll
      for (int i = 0; i < row::kVector; ++i) sum = fmaf(gradients[i], values[i], sum);
    }
    return sum;
  }

  template <class Element>
  __device__ __forceinline__ void store(const GradRow<Element>& row, int first, int step,
                                        float scale, float dot) const {
#pragma unroll
    for (int v = 0; v < kGradVectors; ++v) {
      if (first + v * step >= row.count) continue;
      float gradients[row::kVector], values[row::kVector];
      row::unpack<Element>(dy[v], gradients);
      row::unpack<Element>(y[v], values);
#pragma unroll
      for (int i = 0; i < row::kVector; ++i) {
        values[i] = scale * (values[i] * (gradients[i] - dot));
      }
      row.dx[first + v * step] = row::pack<Element>(values);
    }
  }
};

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, Team::kCtasPerSm)
    gradients_in_registers(const __grid_constant__ SoftmaxGradArguments in, int64_t rows) {
  __shared__ typename Team::Partial partial;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = Team::index();
  if (index >= rows) return;
  const GradRow<Element> row(in, index);
  GradVectors vectors;
  vectors.load(row, Team::thread(), Team::kSize);
  const float dot = Team::reduce(vectors.dot<Element>(), row::Sum(), partial);
  vectors.store<Element>(row, Team::thread(), Team::kSize, in.scale, dot);
}

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, Team::kCtasPerSm)
    gradients_read_twice(const __grid_constant__ SoftmaxGradArguments in, int64_t rows) {
  __shared__ typename Team::Partial partial;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = Team::index();
  if (index >= rows) return;
  const GradRow<Element> row(in, index);
  GradVectors vectors;
  float dot = 0.0f;
#pragma unroll 1
  for (int first = Team::thread(); first < row.count; first += kGradVectors * Team::kSize) {
    vectors.load(row, first, Team::kSize);
    dot += vectors.dot<Element>();
  }
  dot = Team::reduce(dot, row::Sum(), partial);
#pragma unroll 1
  for (int first = Team::thread(); first < row.count; first += kGradVectors * Team::kSize) {
    vectors.load(row, first, Team::kSize);
    vectors.store<Element>(row, first, Team::kSize, in.scale, dot);
  }
}

}  // namespace softmax

template <class Element>
static Status launch_softmax_grad(const SoftmaxGradArguments& in, Stream& stream) {
  return softmax::launch_rows<softmax::kGradVectors>(
      "cudaLaunchKernelEx(softmax_grad)", in, in.rows, stream,
      [](auto team) { return &softmax::gradients_in_registers<Element, decltype(team)>; },
      [](auto team) { return &softmax::gradients_read_twice<Element, decltype(team)>; });
}

}  // namespace fusegen
