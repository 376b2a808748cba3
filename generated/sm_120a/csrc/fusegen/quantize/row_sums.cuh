// Adds the partial row sums that a quantise kernel left: one per column and segment, the rows that
// a tile and a group share. Along tiles and groups one of the two grows from segment to segment, so
// tile + group numbers them.
//
// A thread owns one column of one group. It adds every eighth segment of the group, in order, and
// then the 8 sums, in order: results repeat bit for bit, and 8 segments are under way at once.
#pragma once

#include "fusegen/quantize/quantize.h"
#include "fusegen/quantize/tile.cuh"

namespace fusegen {

namespace quantizing {

// Called by one whole warp of a ragged launch.
__device__ inline void find_group(const RowGroups& groups, int32_t group, int lane, Slice* found) {
  walk_groups(
      groups, lane,
      [&](int32_t each, int32_t begin, int32_t end) {
        if (each == group) *found = {group, begin, end - begin, 0};
      },
      [&](int32_t next, int32_t) { return next > group; });
}

// The segments of a group, for all threads of the block; `shared` is in shared memory.
__device__ inline TileRange group_segments(const RowGroups& groups, int32_t group, int32_t align,
                                           Slice* shared) {
  const Space space{align, groups.rows};
  if (!groups.ragged()) return tiles_with_rows(groups, {group, 0, groups.rows, 0}, space);
  if (threadIdx.x < 32) find_group(groups, group, threadIdx.x, shared);
  __syncthreads();
  const TileRange tiles = tiles_with_rows(groups, *shared, space);
  return {tiles.first + group, tiles.end + group};
}

template <class Output>
__global__ void __launch_bounds__(kThreads)
    row_sum_kernel(const __grid_constant__ RowSumArguments in) {
  constexpr int kSums = 8;
  __shared__ Slice shared;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  const TileRange segments =
      group_segments(groups, blockIdx.y, int32_t(in.row_align), &shared);
  let_next_kernel_start();
  if (column >= in.columns) return;
  const float* from = in.row_sums + column;
  float sums[kSums] = {};
#pragma unroll 2
  for (int32_t first = segments.first; first < segments.end; first += kSums) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (first + i < segments.end) sums[i] += from[(first + i) * in.columns];
    }
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) total += sums[i];
  narrow(total, static_cast<Output*>(in.output) + blockIdx.y * in.columns + column);
}

}  // namespace quantizing

template <class Output>
static Status launch_row_sums(const RowSumArguments& in, Stream& stream) {
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  if (!quantizing::is_alignment(in.row_align)) {
    return {static_cast<int>(cudaErrorInvalidValue), "row_align: a power of two, 16 to 128 rows"};
  }
  constexpr int kThreads = quantizing::kThreads;
  const dim3 blocks(unsigned((in.columns + kThreads - 1) / kThreads), unsigned(in.groups));
  return launch_kernel("cudaLaunchKernelEx(row_sums)", &quantizing::row_sum_kernel<Output>,
                       Grid{blocks, kThreads}, stream, in);
}

}  // namespace fusegen
