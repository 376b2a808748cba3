// Small kernels around quantisation: cleared buffers, the state of delayed scaling and of random
// numbers.
#pragma once

#include "fusegen/quantize/quantize.h"
#include "fusegen/quantize/tile.cuh"

namespace fusegen {

namespace quantizing {

inline constexpr int kDelayedGroups = 8;  // of one block, neighbours in memory

static __global__ void __launch_bounds__(kThreads)
    clear_kernel(const __grid_constant__ ClearArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
#pragma unroll
  for (int b = 0; b < ClearArguments::kMost; ++b) {
    for (int64_t i = first; i < in.counts[b]; i += step) in.buffers[b][i] = 0.0f;
  }
  if (first == 0 && in.rng_state != nullptr) in.rng_state[1] += in.rng_steps;
}

inline constexpr int kDelayedSlots = kThreads / kDelayedGroups;  // that a block holds at once

// A thread's slots of a group, every kDelayedSlots-th from `first` on, one further to the start.
template <int kEach>
__device__ __forceinline__ void roll(const DelayedState& state, int64_t group, int first,
                                     const float (&kept)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t slot = i * kDelayedSlots + first;
    if (slot >= state.slots) continue;
    const int64_t before = slot == 0 ? state.slots - 1 : slot - 1;
    if (slot != 1) state.history[before * state.groups + group] = kept[i];
    if (slot == 0) state.history[group] = 0.0f;
  }
}

// One block per state and 8 groups, a sector of every slot; their whole history is in registers
// while it rolls.
static __global__ void __launch_bounds__(kThreads)
    delayed_kernel(const __grid_constant__ DelayedArguments in) {
  constexpr int kEach = DelayedArguments::kMostSlots / kDelayedSlots;
  __shared__ float scratch[kWarps][kDelayedGroups];
  const DelayedState& state = in.states[blockIdx.y];
  const int place = threadIdx.x % kDelayedGroups, first = threadIdx.x / kDelayedGroups;
  const int64_t group = int64_t(blockIdx.x) * kDelayedGroups + place;
  const bool exists = group < state.groups;
  wait_for_previous_kernel();
  const float newest = exists ? state.history[group] : 0.0f;  // slot 0, empty between steps
  float kept[kEach];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t slot = i * kDelayedSlots + first;
    kept[i] = exists && slot < state.slots ? state.history[slot * state.groups + group] : 0.0f;
    largest = fmaxf(largest, kept[i]);
  }
#pragma unroll
  for (int distance = kDelayedGroups; distance < 32; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, distance));
  }
  if (threadIdx.x % 32 < kDelayedGroups) scratch[threadIdx.x / 32][place] = largest;
  __syncthreads();  // every slot has been read, too
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, scratch[w][place]);
  if (!exists) return;
  if (first == 0) {
    state.scale[group] = delayed_scale(largest, state.scale[group], state.max, state.margin);
  }
  if (state.grouped && newest == 0.0f) return;
  roll(state, group, first, kept);
}

}  // namespace quantizing

[[maybe_unused]] static Status launch_clear(const ClearArguments& in, Stream& stream) {
  constexpr int64_t kMostBlocks = 132;
  int64_t most = 1;
  for (const int64_t count : in.counts) most = count > most ? count : most;
  const int64_t blocks = (most + quantizing::kThreads - 1) / quantizing::kThreads;
  const dim3 most_blocks(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks));
  return launch_kernel("cudaLaunchKernelEx(clear)", &quantizing::clear_kernel,
                       Grid{most_blocks, quantizing::kThreads}, stream, in);
}

[[maybe_unused]] static Status launch_delayed(const DelayedArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  int64_t most = 0;
  for (int i = 0; i < in.count; ++i) {
    const DelayedState& state = in.states[i];
    if (state.slots < 1 || state.slots > DelayedArguments::kMostSlots) {
      return {kInvalid, "1 <= slots <= 1024"};
    }
    if (state.groups < 1) return {kInvalid, "groups >= 1"};
    most = state.groups > most ? state.groups : most;
  }
  if (in.count == 0) return {};
  const int64_t blocks = (most + quantizing::kDelayedGroups - 1) / quantizing::kDelayedGroups;
  return launch_kernel("cudaLaunchKernelEx(delayed)", &quantizing::delayed_kernel,
                       Grid{dim3(unsigned(blocks), unsigned(in.count)), quantizing::kThreads},
                       stream, in);
}

}  // namespace fusegen
