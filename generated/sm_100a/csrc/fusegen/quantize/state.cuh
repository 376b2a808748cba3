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

// Slots of a group's history that a thread has: `first` and every kDelayedSlots-th behind it.
struct OwnSlots {
  static constexpr int kEach = DelayedArguments::kMostSlots / kDelayedSlots;
  float* history;  // of the group, a slot every `pitch` elements
  int pitch;       // of 32 bits, as all offsets are: those of 64 take most of the kernel's time
  int slots, first;

  __device__ __forceinline__ bool has(int i) const { return i * kDelayedSlots < slots - first; }

  __device__ __forceinline__ void load(float (&values)[kEach]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      values[i] = has(i) ? history[(i * kDelayedSlots + first) * pitch] : 0.0f;
    }
  }

  // Each value to the slot before; `newest`, of slot 0, to the last one, and that of slot 1 goes.
  __device__ __forceinline__ void roll(const float (&values)[kEach], float newest) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!has(i) || (i == 0 && first == 0)) continue;
      history[(i * kDelayedSlots + first - 1) * pitch] = i == 0 && first == 1 ? 0.0f : values[i];
    }
    if (first == 0) history[(slots - 1) * pitch] = slots == 1 ? 0.0f : newest;
  }
};

// One block per state and 8 groups, a sector of every slot; their whole history is in registers
// while it rolls. All loads are under way before anything waits for one of them.
static __global__ void __launch_bounds__(kThreads)
    delayed_kernel(const __grid_constant__ DelayedArguments in) {
  __shared__ float scratch[kWarps][kDelayedGroups];
  const DelayedState& state = in.states[blockIdx.y];
  const int place = threadIdx.x % kDelayedGroups, first = threadIdx.x / kDelayedGroups;
  const int64_t group = int64_t(blockIdx.x) * kDelayedGroups + place;
  const bool exists = group < state.groups;
  const int slots = exists ? int(state.slots) : 0;
  const OwnSlots own{state.history + group, int(state.groups), slots, first};
  wait_for_previous_kernel();
  let_next_kernel_start();
  const float scale = exists && first == 0 ? state.scale[group] : 1.0f;
  // Slot 0, which is empty between steps, but for what kernels of this step raised it by.
  const float newest = !exists ? 0.0f : (state.amax != nullptr ? state.amax : state.history)[group];
  float kept[OwnSlots::kEach];
  own.load(kept);
  float largest = newest;
#pragma unroll
  for (int i = 0; i < OwnSlots::kEach; ++i) largest = fmaxf(largest, kept[i]);
#pragma unroll
  for (int distance = kDelayedGroups; distance < 32; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, distance));
  }
  if (threadIdx.x % 32 < kDelayedGroups) scratch[threadIdx.x / 32][place] = largest;
  __syncthreads();  // every slot has been read, too
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, scratch[w][place]);
  if (!exists) return;
  if (first == 0) state.scale[group] = delayed_scale(largest, scale, state.max, state.margin);
  if (!state.grouped || newest != 0.0f) own.roll(kept, newest);
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
    if (state.groups < 1 || state.groups > DelayedArguments::kMostGroups) {
      return {kInvalid, "1 <= groups < 2^21"};
    }
    most = state.groups > most ? state.groups : most;
  }
  if (in.count == 0) return {};
  const int64_t blocks = (most + quantizing::kDelayedGroups - 1) / quantizing::kDelayedGroups;
  return launch_kernel("cudaLaunchKernelEx(delayed)", &quantizing::delayed_kernel,
                       Grid{dim3(unsigned(blocks), unsigned(in.count)), quantizing::kThreads},
                       stream, in);
}

// After a step of a call: its state is due where it moves on, and all that are due by now move on
// together after the last such step. `Arguments` are the step's.
template <class Arguments>
Status move_state(const Arguments& in, Stream& stream) {
  DelayedArguments& due = *in.due;
  if (in.update) due.states[due.count++] = in.state;
  if (!in.moves_states && due.count < DelayedArguments::kMost) return {};
  const Status status = launch_delayed(due, stream);
  due.count = 0;
  return status;
}

}  // namespace fusegen
