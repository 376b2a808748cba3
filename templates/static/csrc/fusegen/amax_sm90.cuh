// Largest magnitudes of groups, rows and columns, and the small kernels around them.
//
// One read of the input, in the quantise kernels' tiles; a block raises each result with one
// integer atomicMax, which orders non-negative floats as numbers do, so that results do not depend
// on timing. Results start at zero: one `launch_clear` per direction, before its first kernel,
// clears every buffer there. A second pass over per-block partial results would cost a kernel per
// tensor, a counter for "the last block" would have to outlive the call.
#pragma once

#include "quantize.h"
#include "quantize_tile.cuh"

namespace fusegen {

namespace quantizing {

struct AmaxShared {
  uint2 columns[kWarps][32];  // packed, of 4 columns
  float scratch[kWarps];
  RowTile tile;
};

template <class Element>
__device__ void raise_rows(float* of_rows, const Values<Element>& values, int rows) {
  const RowAmaxes<Element, 32> amaxes(values);
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * kWarpRows + 2 * amaxes.first_pair(lane) + lane % 2;
  const uint32_t pair = amaxes.pairs[0];
  if (lane % 4 >= 2 || row >= rows) return;
  raise(of_rows + row, lane % 2 == 0 ? widen_low<Element>(pair) : widen_high<Element>(pair));
}

template <class Element>
__device__ void raise_columns(float* of_columns, const Values<Element>& values, int columns,
                              AmaxShared& shared) {
  shared.columns[threadIdx.x / 32][threadIdx.x % 32] =
      make_uint2(values.column_pair_amax(0), values.column_pair_amax(1));
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= min(columns, kTileColumns)) return;
  uint32_t pair = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    pair = maximum<Element>(pair, reinterpret_cast<const uint32_t*>(shared.columns[w])[column / 2]);
  }
  raise(of_columns + column, column % 2 == 0 ? widen_low<Element>(pair) : widen_high<Element>(pair));
}

// After the transform of every 16 rows of a column.
template <class Element>
__device__ float transformed_amax(const Values<Element>& values) {
  float amax = 0.0f;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    float run[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) run[r] = values.at(r, c);
    hadamard(run);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) amax = fmaxf(amax, fabsf(run[r]));
  }
  return amax;
}

template <class Element, bool kHadamard>
__global__ void __launch_bounds__(kThreads, kHadamard ? 3 : 4)
    amax_kernel(const __grid_constant__ AmaxArguments in) {
  __shared__ AmaxShared shared;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const RowTile tile = block_tile(groups, &shared.tile);
  if (tile.group < 0 || tile.group == groups.groups || tile.length == 0) return;
  const int64_t row = input_row(groups, tile);
  const int32_t first_column = blockIdx.y * kTileColumns;
  const int columns = int(in.columns) - first_column;

  Values<Element> values;
  values.load(static_cast<const Element*>(in.input) + row * in.columns + first_column,
              uint32_t(in.columns), tile.rows(), columns);
  let_next_kernel_start();
  if (in.of_row != nullptr) raise_rows(in.of_row + row, values, tile.rows());
  if (in.of_column != nullptr) {
    raise_columns(in.of_column + tile.group * in.columns + first_column, values, columns, shared);
  }
  if (in.of_group != nullptr) {
    raise_by_block(in.of_group + tile.group, values.amax(), shared.scratch);
  }
  if constexpr (kHadamard) {
    raise_by_block(in.of_transformed_group + tile.group, transformed_amax(values), shared.scratch);
  }
}

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

// One block per group, the whole history of a group in registers while it rolls.
static __global__ void __launch_bounds__(kThreads)
    delayed_kernel(const __grid_constant__ DelayedArguments in) {
  constexpr int kEach = DelayedArguments::kMostSlots / kThreads;
  __shared__ float scratch[kWarps];
  const int64_t group = blockIdx.x;
  wait_for_previous_kernel();
  const float newest = fmaxf(in.history[group], in.amax[group]);  // slot 0 is empty between steps
  float kept[kEach];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t slot = i * kThreads + threadIdx.x;
    kept[i] = slot == 0 ? newest : slot < in.slots ? in.history[slot * in.groups + group] : 0.0f;
    largest = fmaxf(largest, kept[i]);
  }
  largest = warp_amax(largest);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();  // every slot has been read, too
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, scratch[w]);
  if (threadIdx.x == 0) {
    in.scale[group] = delayed_scale(largest, in.scale[group], in.max, in.margin);
  }
  if (in.grouped && newest == 0.0f) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t slot = i * kThreads + threadIdx.x;
    if (slot >= in.slots) continue;
    if (slot != 1) in.history[(slot == 0 ? in.slots - 1 : slot - 1) * in.groups + group] = kept[i];
    if (slot == 0) in.history[group] = 0.0f;
  }
}

}  // namespace quantizing

// `of_transformed_group` is written where kHadamard, and only there.
template <class Element, bool kHadamard = false>
static Status launch_amax(const AmaxArguments& in, cudaStream_t stream) {
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  if ((in.of_transformed_group != nullptr) != kHadamard) {
    return {static_cast<int>(cudaErrorInvalidValue), "of_transformed_group: with a transform"};
  }
  return quantizing::launch_tiles("cudaLaunchKernelEx(amax)",
                                  &quantizing::amax_kernel<Element, kHadamard>, in, stream);
}

inline Status launch_clear(const ClearArguments& in, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 132;
  int64_t most = 1;
  for (const int64_t count : in.counts) most = count > most ? count : most;
  const int64_t blocks = (most + quantizing::kThreads - 1) / quantizing::kThreads;
  const dim3 grid(unsigned(blocks < kMostBlocks ? blocks : kMostBlocks));
  return quantizing::launch_grid("cudaLaunchKernelEx(clear)", &quantizing::clear_kernel, grid,
                                 quantizing::kThreads, in, stream);
}

inline Status launch_delayed(const DelayedArguments& in, cudaStream_t stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.slots < 1 || in.slots > DelayedArguments::kMostSlots) return {kInvalid, "1 <= slots <= 1024"};
  if (in.groups < 1) return {kInvalid, "groups >= 1"};
  return quantizing::launch_grid("cudaLaunchKernelEx(delayed)", &quantizing::delayed_kernel,
                                 dim3(unsigned(in.groups)), quantizing::kThreads, in, stream);
}

}  // namespace fusegen
