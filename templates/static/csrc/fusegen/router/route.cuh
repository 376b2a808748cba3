// Which experts each row of logits chooses, their weights, how often each is chosen, and two losses.
//
// A warp has a row at a time. The first kernel has a block for each part of the rows, whose sums it
// leaves; the second, one block, adds those up in order and makes losses of them, so results repeat
// bit for bit. What blocks add to in any order are integers in their own shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/router/choice.cuh"
#include "fusegen/router/logits.cuh"
#include "fusegen/router/route.h"

namespace fusegen {

namespace router {

// Warps of a block: as many as have the registers for a lane's values, and a row of all experts each
// in 32 KiB.
template <int kValues>
inline constexpr int kWarps = kValues <= 8 ? 32 : kValues == 16 ? 16 : 8;

inline constexpr int kSumThreads = 1024;  // of the second kernel: one for each expert or part
static_assert(kSumThreads >= kMostExperts && kSumThreads >= kRouteParts);

// The rows of a part: every so-many-th of a sequence's. The last parts have none where they are no
// whole number for each sequence.
struct PartOfRows {
  int64_t begin, end;  // of the sequence
  int index, beside;   // the part's number, of as many of the sequence

  __device__ PartOfRows(const RouteArguments& in, int part)
      : beside(int(in.parts / in.sequences)) {
    const int64_t rows = in.tokens / in.sequences, sequence = part / beside;
    const bool exists = sequence < in.sequences;
    begin = exists ? sequence * rows : 0;
    end = exists ? begin + rows : 0;
    index = part % beside;
  }
};

// Scores of one row, and what experts are chosen by.
template <int kValues>
struct ScoredRow {
  float scores[kValues];
  float lse;  // where the scores are a softmax, or it is asked for

  __device__ ScoredRow(const float (&logits)[kValues], Score score, bool wants_lse) : lse(0.0f) {
    if (score == Score::softmax || wants_lse) {
      const Exponentials row(logits);
      lse = row.lse();
      const float inverse = 1.0f / row.sum;
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[i] = exp(logits[i] - row.largest) * inverse;
    }
    if (score == Score::softmax) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) scores[i] = score_of(score, logits[i]);
  }
};

// A lane's choice: the expert that its warp's row chooses as the `lane`-th, and its score.
struct Choice {
  int expert = 0;
  float score = 0.0f;
};

template <int kValues>
__device__ __forceinline__ Choice choose(const RouteArguments& in,
                                         const float (&logits)[kValues],
                                         const float (&scores)[kValues], int first) {
  const bool grouped = in.kept_groups < in.groups;
  const bool by_scores = in.choice_bias != nullptr || (grouped && in.group_top > 1);
  uint32_t keys[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const bool exists = first + i < int(in.experts);
    float value = by_scores ? scores[i] : logits[i];
    if (in.choice_bias != nullptr && exists) value += __ldg(in.choice_bias + first + i);
    keys[i] = exists ? key_of(value) : 0;
  }
  if (grouped) Groups(in).keep_best(keys, first);
  Best<kValues> best(keys);
  Choice own;
#pragma unroll 1
  for (int choice = 0; choice < int(in.choices); ++choice) {
    const Winner winner(best.key);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) score = i == best.index ? scores[i] : score;
    score = __shfl_sync(kAllLanes, score, winner.lane);
    const int expert = __shfl_sync(kAllLanes, first + best.index, winner.lane);
    if (lane_of_warp() == choice) own = {expert, score};
    if (lane_of_warp() != winner.lane) continue;
    take(keys, best.index);
    best = Best<kValues>(keys);
  }
  return own;
}

__device__ __forceinline__ void store_choice(const RouteArguments& in, int64_t token,
                                             const Choice& own, unsigned* counts) {
  const int lane = lane_of_warp();
  const bool chosen = lane < int(in.choices);
  float weight = chosen ? own.score : 0.0f;
  if (in.normalized) {
    const float total = reduce_lanes(weight, row::Sum()) + in.eps;
    weight = weight / divisor_of(total, in.least_sum);
  }
  if (!chosen) return;
  const int64_t at = token * in.choices + lane;
  in.probs[at] = in.scale * weight;
  static_cast<int32_t*>(in.ids)[at] = own.expert;
  atomicAdd(counts + own.expert, 1u);
}

template <int kValues>
static __global__ void __launch_bounds__(kWarps<kValues>* kWarp, 1)
    choices_of_rows(const __grid_constant__ RouteArguments in) {
  constexpr int kThreads = kWarps<kValues> * kWarp, kRow = kValues * kWarp;
  __shared__ unsigned counts[kRow];
  __shared__ float shares[kWarps<kValues>][kRow];
  __shared__ float squares[kWarps<kValues>];
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int i = int(threadIdx.x); i < kRow; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int warp = int(threadIdx.x) / kWarp, first = lane_of_warp() * kValues;
  const int experts = int(in.experts);
  const bool balances = in.aux_coefficient != 0.0f, flattens = in.z_coefficient != 0.0f;
  float of_shares[kValues] = {}, of_squares = 0.0f;
  const PartOfRows part(in, int(blockIdx.x));
  const int64_t step = part.beside * int64_t(kWarps<kValues>);
#pragma unroll 1
  for (int64_t token = part.begin + part.index * int64_t(kWarps<kValues>) + warp; token < part.end;
       token += step) {
    float logits[kValues];
    load_logits(in.logits + token * experts, first, experts, logits);
    const ScoredRow<kValues> row(logits, in.score, flattens);
    store_choice(in, token, choose(in, logits, row.scores, first), counts);
    if (balances) {
      const float factor = in.score == Score::softmax ? 1.0f : 1.0f / total_of(row.scores);
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_shares[i] += row.scores[i] * factor;
    }
    if (flattens) of_squares += row.lse * row.lse;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) shares[warp][first + i] = of_shares[i];
  if (lane_of_warp() == 0) squares[warp] = of_squares;
  __syncthreads();
  float* const sums = in.sums + int64_t(blockIdx.x) * (experts + 1);
  auto* const chosen = static_cast<unsigned*>(in.chosen) + int64_t(blockIdx.x) * experts;
  for (int i = int(threadIdx.x); i < experts; i += kThreads) {
    chosen[i] = counts[i];
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps<kValues>; ++w) sum += shares[w][i];
    sums[i] = sum;
  }
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps<kValues>; ++w) sum += squares[w];
  sums[experts] = sum;
}

// What a thread has of an expert: how often it was chosen, and its loss but for a factor.
struct Column {
  unsigned count = 0;
  float loss = 0.0f;
};

// Of an expert, by a team of `teams`: each has every so-many-th sequence.
__device__ __forceinline__ Column of_sequences(const RouteArguments& in, int expert, int team,
                                               int teams) {
  const int experts = int(in.experts), beside = int(in.parts / in.sequences);
  const float total = fmaxf(float(in.tokens / in.sequences * in.choices), 1.0f);
  const auto* const chosen = static_cast<const unsigned*>(in.chosen);
  Column own;
  for (int sequence = team; sequence < int(in.sequences); sequence += teams) {
    unsigned count = 0;
    float share = 0.0f;
    for (int part = sequence * beside; part < (sequence + 1) * beside; ++part) {
      count += chosen[int64_t(part) * experts + expert];
      share += in.sums[int64_t(part) * (experts + 1) + expert];
    }
    own.count += count;
    own.loss += float(count) / total * share;
  }
  return own;
}

// How often an expert was chosen in every so-many-th part, and its shares there, added up in order. What
// several parts have is under way together: a loop that may end behind any waits for each.
__device__ __forceinline__ void add_parts(const RouteArguments& in, int expert, int first, int step,
                                          unsigned& count, float& share) {
  constexpr int kAtOnce = 12;
  const int experts = int(in.experts), parts = int(in.parts);
  const auto* const chosen = static_cast<const unsigned*>(in.chosen) + expert;
  const float* const sums = in.sums + expert;
  for (int part = first; part < parts; part += kAtOnce * step) {
    unsigned counts[kAtOnce];
    float shares[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int other = part + i * step;
      counts[i] = other < parts ? __ldcg(chosen + other * experts) : 0;
      shares[i] = other < parts ? __ldcg(sums + other * (experts + 1)) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      count += counts[i];
      share += shares[i];
    }
  }
}

// Threads of a column add up every so-many-th part of it, and one of them what they have; where there
// are several sequences, every so-many-th of these.
static __global__ void __launch_bounds__(kSumThreads, 1)
    sums_of_parts(const __grid_constant__ RouteArguments in) {
  using Block = row::Team<kSumThreads>;
  __shared__ float shares[kSumThreads];
  __shared__ unsigned counts[kSumThreads];
  __shared__ typename Block::Partial of_numbers, of_losses, of_squares;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int experts = int(in.experts), parts = int(in.parts), thread = int(threadIdx.x);
  const int teams = kSumThreads / experts;  // of as many threads as there are experts
  const int expert = thread % experts, team = thread / experts;
  const bool several = in.sequences > 1;
  float share = 0.0f;  // or loss, of several
  unsigned count = 0;
  if (several && team < teams) {
    const Column own = of_sequences(in, expert, team, teams);
    share = own.loss;
    count = own.count;
  } else if (team < teams) {
    add_parts(in, expert, team, teams, count, share);
  }
  shares[thread] = share;
  counts[thread] = count;
  __syncthreads();
  float number = 0.0f;
  if (thread < experts) {
    for (int other = 1; other < teams; ++other) {
      share += shares[other * experts + thread];
      count += counts[other * experts + thread];
    }
    in.counts[thread] = count;
    number = in.all_counts != nullptr ? float(__ldg(in.all_counts + thread)) : float(count);
  }
  const float square = thread < parts ? in.sums[int64_t(thread) * (experts + 1) + experts] : 0.0f;
  const float squares = Block::reduce(square, row::Sum(), of_squares);
  const float total = fmaxf(Block::reduce(number, row::Sum(), of_numbers), 1.0f);
  float loss = several ? share : number / total * share;
  loss = thread < experts ? loss : 0.0f;
  const float losses = Block::reduce(loss, row::Sum(), of_losses);
  if (thread != 0) return;
  // Choices of all sequences: the divisor of their mean is in it.
  const float factor = in.aux_coefficient * float(in.choices * in.experts) / total;
  const float rows = fmaxf(float(in.tokens), 1.0f);
  *in.aux_loss = in.aux_coefficient != 0.0f ? factor * losses : 0.0f;
  *in.z_loss = in.z_coefficient != 0.0f ? in.z_coefficient * (squares / rows) : 0.0f;
}

}  // namespace router

// Whatever the module's own type is: logits and weights are fp32.
template <class Element>
static Status launch_route(const RouteArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  constexpr const char* kCall = "cudaLaunchKernelEx(route)";
  if (in.groups < 1 || in.groups > kMostChoices || in.experts % in.groups != 0) {
    return {kInvalid, "groups: from 1 to 32, and a divisor of experts"};
  }
  if (in.kept_groups < in.groups && in.experts / in.groups * in.kept_groups < in.choices) {
    return {kInvalid, "choices: no more than the groups that are kept have"};
  }
  if (in.parts != kRouteParts) return {kInvalid, "parts: as many as route.h says"};
  const Status sequences = router::check_sequences(in);
  if (!sequences.ok()) return sequences;
  const Status status = router::with_values(in, [&](auto values) -> Status {
    constexpr int kValues = decltype(values)::value;
    const Grid grid{dim3(unsigned(in.parts)), router::kWarps<kValues> * router::kWarp};
    return launch_kernel(kCall, &router::choices_of_rows<kValues>, grid, stream, in);
  });
  if (!status.ok()) return status;
  return launch_kernel(kCall, &router::sums_of_parts, Grid{dim3(1), router::kSumThreads}, stream, in);
}

}  // namespace fusegen
