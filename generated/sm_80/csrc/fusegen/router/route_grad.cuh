// The gradient of a router's logits: of the weights of chosen experts, and of both losses.
//
// A warp has a row at a time, whose scores it makes again. A lane has the gradient of the weight of
// one choice, and gives it to the lane of that expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fusegen/common/ceil_div.h"
#include "fusegen/fragment/pairs.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/router/logits.cuh"
#include "fusegen/router/route.h"

namespace fusegen {

namespace router {

inline constexpr int kGradWarps = 8;        // of a block
inline constexpr int64_t kGradBlocks = 1056;  // at most: 8 for each multiprocessor of an H200

// The rows of a block: every so-many-th of a sequence's.
struct RowsOfBlock {
  int begin, end;     // of the sequence
  int index, beside;  // the block's number, of as many of the sequence

  __device__ explicit RowsOfBlock(const RouteGradArguments& in)
      : beside(int(gridDim.x) / int(in.sequences)) {
    const int rows = int(in.tokens) / int(in.sequences);
    begin = int(blockIdx.x) / beside * rows;
    end = begin + rows;
    index = int(blockIdx.x) % beside;
  }
};

// How often the rows of one of several sequences chose each expert.
__device__ __forceinline__ void count_choices(const RouteGradArguments& in, const RowsOfBlock& rows,
                                              unsigned* counts) {
  constexpr int kThreads = kGradWarps * kWarp;
  for (int i = int(threadIdx.x); i < int(in.experts); i += kThreads) counts[i] = 0;
  __syncthreads();
  const auto* const ids = static_cast<const int32_t*>(in.ids);
  const int64_t end = int64_t(rows.end) * in.choices;
  for (int64_t i = int64_t(rows.begin) * in.choices + int(threadIdx.x); i < end; i += kThreads) {
    atomicAdd(counts + __ldg(ids + i), 1u);
  }
  __syncthreads();
}

// What the auxiliary loss multiplies each expert's shares by, times the loss' gradient, or zeros.
// All threads of a block call it.
__device__ __forceinline__ void load_factors(const RouteGradArguments& in, const RowsOfBlock& rows,
                                             unsigned* of_sequence, float* factors) {
  using Block = row::Team<kGradWarps * kWarp>;
  __shared__ typename Block::Partial partial;
  const int64_t* const counts = in.all_counts != nullptr ? in.all_counts : in.counts;
  const bool balances = in.aux_coefficient != 0.0f && in.daux_loss != nullptr;
  const bool several = in.sequences > 1;
  if (balances && several) count_choices(in, rows, of_sequence);
  float own = 0.0f;
  for (int i = int(threadIdx.x); balances && i < int(in.experts); i += Block::kSize) {
    factors[i] = several ? float(of_sequence[i]) : float(__ldg(counts + i));
    own += factors[i];
  }
  const float total = fmaxf(Block::reduce(own, row::Sum(), partial), 1.0f);
  if (!balances) return;
  const float factor = __ldg(in.daux_loss) * in.aux_coefficient *
                       float(in.choices * in.experts) / (float(in.sequences) * total);
  for (int i = int(threadIdx.x); i < int(in.experts); i += Block::kSize) {
    factors[i] = factor * (factors[i] / total);
  }
}

// Of the scores of a row's chosen experts, for the lane of each choice; `score` is that of the
// lane's expert and `given` the gradient of its weight, both 0 in lanes without one.
__device__ __forceinline__ float gradient_of_score(const RouteGradArguments& in, float score,
                                                   float given) {
  if (!in.normalized) return given;
  const float total = reduce_lanes(score, row::Sum()) + in.eps;
  const float divisor = divisor_of(total, in.least_sum);
  const float mean = reduce_lanes(given * score, row::Sum()) / divisor;
  return (total < in.least_sum ? given : given - mean) / divisor;
}

// Adds what the lanes of choices have to the values of their experts.
template <int kValues>
__device__ __forceinline__ void add_to_experts(float (&to)[kValues], int first, int choices,
                                               int expert, float value) {
#pragma unroll 1
  for (int choice = 0; choice < choices; ++choice) {
    const int index = __shfl_sync(kAllLanes, expert, choice) - first;
    const float own = __shfl_sync(kAllLanes, value, choice);
#pragma unroll
    for (int i = 0; i < kValues; ++i) to[i] = i == index ? to[i] + own : to[i];
  }
}

// Gradients of shares, in place, as those of scores.
template <int kValues>
__device__ __forceinline__ void of_scores(float (&values)[kValues],
                                          const float (&factors)[kValues],
                                          const float (&scores)[kValues], Score score) {
  float mean = 0.0f, inverse = 1.0f;
  if (score != Score::softmax) {
    inverse = 1.0f / total_of(scores);
#pragma unroll
    for (int i = 0; i < kValues; ++i) mean += factors[i] * scores[i];
    mean = reduce_lanes(mean, row::Sum()) * inverse;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] += (factors[i] - mean) * inverse;
}

// Gradients of scores, in place, as those of logits.
template <int kValues>
__device__ __forceinline__ void of_logits(float (&values)[kValues],
                                          const float (&logits)[kValues],
                                          const float (&scores)[kValues], Score score) {
  float mean = 0.0f;
  if (score == Score::softmax) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) mean += values[i] * scores[i];
    mean = reduce_lanes(mean, row::Sum());
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = score == Score::softmax ? scores[i] * (values[i] - mean)
                                        : values[i] * slope_of(score, logits[i], scores[i]);
  }
}

template <class Element, int kValues>
__device__ __forceinline__ void store_logits(void* row, int first, int experts,
                                             const float (&values)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i += kLoad) {
    if (first + i >= experts) break;
    const uint2 four{round_pair(values[i], values[i + 1], Element()),
                     round_pair(values[i + 2], values[i + 3], Element())};
    *reinterpret_cast<uint2*>(static_cast<Element*>(row) + first + i) = four;
  }
}

template <class Element, int kValues>
static __global__ void __launch_bounds__(kGradWarps* kWarp)
    gradients_of_rows(const __grid_constant__ RouteGradArguments in) {
  __shared__ float all_factors[kValues * kWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  __shared__ unsigned all_counts[kValues * kWarp];
  const RowsOfBlock rows(in);
  load_factors(in, rows, all_counts, all_factors);
  __syncthreads();
  const int lane = lane_of_warp(), first = lane * kValues;
  const int experts = int(in.experts), choices = int(in.choices);
  const bool softmax = in.score == Score::softmax;
  const bool balances = in.aux_coefficient != 0.0f && in.daux_loss != nullptr;
  const bool flattens = in.z_coefficient != 0.0f && in.dz_loss != nullptr;
  float of_square = 0.0f;
  if (flattens) of_square = 2.0f * in.z_coefficient / float(in.tokens) * __ldg(in.dz_loss);
  const int step = rows.beside * kGradWarps;
#pragma unroll 1
  for (int64_t token = rows.begin + rows.index * kGradWarps + int(threadIdx.x) / kWarp;
       token < rows.end; token += step) {
    const float* const row = in.logits + token * experts;
    float logits[kValues], scores[kValues], values[kValues] = {};
    load_logits(row, first, experts, logits);
    int expert = 0;
    float given = 0.0f, chosen = 0.0f;
    if (lane < choices) {
      const int64_t at = token * choices + lane;
      expert = __ldg(static_cast<const int32_t*>(in.ids) + at);
      given = in.scale * __ldg(in.dprobs + at);
      chosen = __ldg(row + expert);
    }
    float lse = 0.0f;
    if (softmax || flattens) {
      const Exponentials of_row(logits);
      lse = of_row.lse();
      const float inverse = 1.0f / of_row.sum;
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[i] = exp(logits[i] - of_row.largest) * inverse;
      if (softmax) chosen = exp(chosen - of_row.largest) * inverse;
    }
    float of_lse[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) of_lse[i] = flattens ? of_square * lse * scores[i] : 0.0f;
    if (!softmax) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[i] = score_of(in.score, logits[i]);
      chosen = score_of(in.score, chosen);
    }
    chosen = lane < choices ? chosen : 0.0f;
    add_to_experts(values, first, choices, expert, gradient_of_score(in, chosen, given));
    if (balances) {
      float factors[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        factors[i] = first + i < experts ? all_factors[first + i] : 0.0f;
      }
      of_scores(values, factors, scores, in.score);
    }
    of_logits(values, logits, scores, in.score);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += of_lse[i];
    store_logits<Element>(static_cast<Element*>(in.dlogits) + token * experts, first, experts,
                          values);
  }
}

}  // namespace router

template <class Element>
static Status launch_route_grad(const RouteGradArguments& in, Stream& stream) {
  const Status sequences = router::check_sequences(in);
  if (!sequences.ok()) return sequences;
  return router::with_values(in, [&](auto values) -> Status {
    constexpr int kValues = decltype(values)::value;
    if (in.tokens == 0) return {};
    const int64_t blocks = ceil_div(in.tokens / in.sequences, int64_t(router::kGradWarps));
    const int64_t most = router::kGradBlocks / in.sequences;
    const int64_t some = in.sequences * (blocks < most ? blocks : most);
    const Grid grid{dim3(unsigned(some)), router::kGradWarps * router::kWarp};
    return launch_kernel("cudaLaunchKernelEx(route_grad)",
                         &router::gradients_of_rows<Element, kValues>, grid, stream, in);
  });
}

}  // namespace fusegen
