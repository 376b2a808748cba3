// The logits of a row in the lanes of a warp, and the scores that weights are made of.
//
// A lane has `kValues` neighbouring experts, 4, 8, 16 or 32: so the first lane of several has the
// lowest number, and 4 experts are one load. Those past the last expert count as -inf.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fusegen/launch/launch.cuh"
#include "fusegen/pointwise/math.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/router/route.h"

namespace fusegen {

namespace router {

using row::kAllLanes;
using row::kWarp;

inline constexpr int kLoad = 4;  // logits in 16 bytes

// Added to the sum of a row's scores before they become shares.
inline constexpr float kLeastTotal = 1e-20f;

__device__ __forceinline__ int lane_of_warp() { return int(threadIdx.x) % kWarp; }

// The same value for every lane, in a fixed order.
template <class Combine>
__device__ __forceinline__ float reduce_lanes(float value, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <int kValues>
__device__ __forceinline__ void load_logits(const float* row, int first, int experts,
                                            float (&to)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i += kLoad) {
    float4 four{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if (first + i < experts) four = __ldg(reinterpret_cast<const float4*>(row + first + i));
    to[i] = four.x;
    to[i + 1] = four.y;
    to[i + 2] = four.z;
    to[i + 3] = four.w;
  }
}

// The largest logit of a row, and the sum of exponentials of all less that.
struct Exponentials {
  float largest, sum;

  template <int kValues>
  __device__ explicit Exponentials(const float (&logits)[kValues]) {
    largest = logits[0];
#pragma unroll
    for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, logits[i]);
    largest = reduce_lanes(largest, row::Max());
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += exp(logits[i] - largest);
    sum = reduce_lanes(sum, row::Sum());
  }

  __device__ float lse() const { return largest + logf(sum); }
  __device__ float softmax(float logit) const { return exp(logit - largest) / sum; }
};

// Of scores that are functions of one logit.
__device__ __forceinline__ float score_of(Score score, float logit) {
  return score == Score::sigmoid ? sigmoid(logit) : sqrtf(softplus(logit));
}

__device__ __forceinline__ float slope_of(Score score, float logit, float value) {
  if (score == Score::sigmoid) return sigmoid_slope(logit);
  return value == 0.0f ? 0.0f : sigmoid(logit) / (2.0f * value);
}

// What scores are divided by, that they add up to 1: of a softmax they do.
template <int kValues>
__device__ __forceinline__ float total_of(const float (&scores)[kValues]) {
  float total = 0.0f;
#pragma unroll
  for (float value : scores) total += value;
  return reduce_lanes(total, row::Sum()) + kLeastTotal;
}

// What weights are divided by. Comparing instead of fmaxf, which drops NaN.
__device__ __forceinline__ float divisor_of(float total, float least) {
  return total < least ? least : total;
}

template <class Arguments>
Status check_sequences(const Arguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.sequences < 1 || in.sequences > kRouteParts || in.tokens % in.sequences != 0) {
    return {kInvalid, "sequences: from 1 to 132, and a divisor of tokens"};
  }
  if (in.sequences != 1 && in.all_counts != nullptr) {
    return {kInvalid, "sequences: 1 beside all_counts, which are of one loss"};
  }
  return {};
}

// Calls launch(values) with a number of values of a lane, the smallest for all experts.
template <class Arguments, class Launch>
Status with_values(const Arguments& in, Launch launch) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const int64_t tokens = in.tokens, experts = in.experts, choices = in.choices;
  if (tokens < 0 || tokens > INT32_MAX) return {kInvalid, "0 <= tokens < 2^31"};
  if (experts < kRowAlignment || experts > kMostExperts || experts % kRowAlignment != 0) {
    return {kInvalid, "experts: a multiple of 8, from 8 to 1024"};
  }
  if (choices < 1 || choices > kMostChoices || choices > experts) {
    return {kInvalid, "choices: from 1 to 32, and no more than experts"};
  }
  if (experts <= 4 * kWarp) return launch(std::integral_constant<int, 4>());
  if (experts <= 8 * kWarp) return launch(std::integral_constant<int, 8>());
  if (experts <= 16 * kWarp) return launch(std::integral_constant<int, 16>());
  return launch(std::integral_constant<int, 32>());
}

}  // namespace router

}  // namespace fusegen
