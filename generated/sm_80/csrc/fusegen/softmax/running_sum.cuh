// The largest of a row's scores and the sum of their exponentials, in one read.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/exponential.cuh"

namespace fusegen {

namespace softmax {

using row::kVector;

template <int kVectors>
__device__ __forceinline__ float largest_of(const float (&scores)[kVectors][kVector]) {
  float largest = -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (float score : scores[v]) largest = fmaxf(largest, score);
  }
  return largest;
}

// The sum of exponentials of scores that come in turn, less the largest of them so far.
struct RunningSum {
  float largest = -INFINITY;
  float sum = 0.0f;

  template <int kVectors>
  __device__ __forceinline__ void add(const float (&scores)[kVectors][kVector]) {
    const float before = largest;
    largest = fmaxf(largest, largest_of(scores));
    const float shift = shift_of(largest);
    sum *= exponential(before, shift);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (float score : scores[v]) sum += exponential(score, shift);
    }
  }

  // The sum as it would be less another number, at least as large.
  __device__ float sum_less(float other) const { return sum * exponential(largest, shift_of(other)); }
};

}  // namespace softmax

}  // namespace fusegen
