// Adds the partial row sums that a quantise kernel left: one per tile of 128 rows and column.
//
// A thread owns one column of one group. It adds every eighth tile of the group, in order, and then
// the 8 sums, in order: results repeat bit for bit, and 8 tiles are under way at once.
#pragma once

#include "quantize.h"
#include "quantize_tile.cuh"

namespace fusegen {

namespace quantizing {

struct TileRange {
  int32_t first, end;
};

// Called by one whole warp of a ragged launch.
__device__ inline void find_tiles(const RowGroups& groups, int32_t group, int lane,
                                  TileRange* found) {
  walk_groups(groups, lane, [&](const LaneGroups& own, Extent first, Extent) {
    const int32_t index = group - own.first;
    if (index >= 0 && index < LaneGroups::kMost) {
      *found = {first.tiles + own.before(index).tiles, first.tiles + own.before(index + 1).tiles};
    }
    return group >= own.first - lane * LaneGroups::kMost + kChunk;
  });
}

// The tiles of a group, for all threads of the block; `shared` is in shared memory.
__device__ inline TileRange group_tiles(const RowGroups& groups, int32_t group, TileRange* shared) {
  if (!groups.ragged()) {
    const int32_t each = tiles_of_matrix(groups);
    return {group * each, (group + 1) * each};
  }
  if (threadIdx.x < 32) find_tiles(groups, group, threadIdx.x, shared);
  __syncthreads();
  return *shared;
}

template <class Output>
__global__ void __launch_bounds__(kThreads)
    row_sum_kernel(const __grid_constant__ RowSumArguments in) {
  constexpr int kSums = 8;
  __shared__ TileRange shared;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  const TileRange tiles = group_tiles(groups, blockIdx.y, &shared);
  let_next_kernel_start();
  if (column >= in.columns) return;
  const float* from = in.row_sums + column;
  float sums[kSums] = {};
#pragma unroll 2
  for (int32_t first = tiles.first; first < tiles.end; first += kSums) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (first + i < tiles.end) sums[i] += from[(first + i) * in.columns];
    }
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) total += sums[i];
  narrow(total, static_cast<Output*>(in.output) + blockIdx.y * in.columns + column);
}

}  // namespace quantizing

template <class Output>
static Status launch_row_sums(const RowSumArguments& in, cudaStream_t stream) {
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  const dim3 grid(unsigned((in.columns + quantizing::kThreads - 1) / quantizing::kThreads),
                  unsigned(in.groups));
  return quantizing::launch_grid("cudaLaunchKernelEx(row_sums)",
                                 &quantizing::row_sum_kernel<Output>, grid, quantizing::kThreads,
                                 in, stream);
}

}  // namespace fusegen
