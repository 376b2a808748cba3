// Adds the partial row sums that a quantise kernel left: one per tile of 128 rows and column.
//
// A block owns 32 columns of one group; each of its 8 warps adds every eighth tile of the group, in
// order, and the 8 sums are added in order: results repeat bit for bit.
#pragma once

#include "quantize.h"
#include "quantize_tile.cuh"

namespace fusegen {

namespace quantizing {

struct TileRange {
  int32_t first, end;
};

// Tiles of one group. Called by one whole warp.
__device__ inline TileRange group_tiles(const RowGroups& groups, int32_t group, int lane) {
  if (!groups.ragged()) {
    const int32_t each = tiles_of_matrix(groups);
    return {group * each, (group + 1) * each};
  }
  const LaneGroups own = lane_groups(groups, lane);
  const int32_t begin = lane_begin(groups, own, lane);
  const int32_t before = lane_tiles(groups, {own.first, min(own.end, group)}, begin);
  const int32_t through = lane_tiles(groups, {own.first, min(own.end, group + 1)}, begin);
  return {int32_t(__reduce_add_sync(kAll, unsigned(before))),
          int32_t(__reduce_add_sync(kAll, unsigned(through)))};
}

template <class Output>
__global__ void __launch_bounds__(kThreads)
    row_sum_kernel(const __grid_constant__ RowSumArguments in) {
  __shared__ float sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  const int64_t column = int64_t(blockIdx.x) * 32 + lane;
  wait_for_previous_kernel();
  const TileRange tiles = group_tiles(groups, blockIdx.y, lane);
  let_next_kernel_start();
  float sum = 0.0f;
  if (column < in.columns) {
#pragma unroll 4
    for (int32_t tile = tiles.first + warp; tile < tiles.end; tile += kWarps) {
      sum += in.row_sums[tile * in.columns + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= in.columns) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w][lane];
  narrow(total, static_cast<Output*>(in.output) + blockIdx.y * in.columns + column);
}

}  // namespace quantizing

template <class Output>
static Status launch_row_sums(const RowSumArguments& in, cudaStream_t stream) {
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  const dim3 grid(unsigned((in.columns + 31) / 32), unsigned(in.groups));
  return quantizing::launch_grid("cudaLaunchKernelEx(row_sums)",
                                 &quantizing::row_sum_kernel<Output>, grid, quantizing::kThreads,
                                 in, stream);
}

}  // namespace fusegen
