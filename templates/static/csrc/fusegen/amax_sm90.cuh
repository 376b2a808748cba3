// Largest magnitudes of groups, rows and columns.
//
// One read of the input, in the quantise kernels' tiles; a block raises each result with one
// integer atomicMax, which orders non-negative floats as numbers do, so that results do not depend
// on timing. Results start at zero: one `launch_clear` (quantize_state.cuh) per direction, before
// its first kernel, clears every buffer there. A second pass over partial results of blocks would
// cost a kernel per tensor, a counter for "the last block" would have to outlive the call.
#pragma once

#include "quantize.h"
#include "quantize_source.cuh"
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
  raise(of_rows + row, widen<Element>(pair, lane % 2));
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
  raise(of_columns + column, widen<Element>(pair, column % 2));
}

// After the transform of every 16 rows of a column. What comes last there, a factor and rounding,
// keeps the order of magnitudes, and is left to the largest.
template <class Element>
__device__ float transformed_amax(const Values<Element>& values) {
  float amax = 0.0f;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    float run[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) run[r] = values.at(r, c);
    butterflies(run);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) amax = fmaxf(amax, fabsf(run[r]));
  }
  return round_to_bfloat16(amax * 0.25f);
}

template <class Source, bool kHadamard>
__global__ void __launch_bounds__(kThreads, 4)
    amax_kernel(const __grid_constant__ AmaxArguments in, const __grid_constant__ Source source) {
  using Element = typename Source::Element;
  __shared__ AmaxShared shared;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const RowTile tile = block_tile(groups, &shared.tile);
  if (tile.group < 0 || tile.group == groups.groups || tile.length == 0) return;
  const int64_t row = input_row(groups, tile);
  const int32_t first_column = blockIdx.y * kTileColumns;
  const int columns = int(in.columns) - first_column;

  Values<Element> values;
  const int first = threadIdx.x / 32 * kWarpRows;
  source.load(values, in, row + first, first_column + threadIdx.x % 32 * kLaneColumns,
              tile.rows() - first);
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

}  // namespace quantizing

// `of_transformed_group` is written where kHadamard, and only there.
template <class Element, bool kHadamard = false, class Source = TensorSource<Element>>
static Status launch_amax(const AmaxArguments& in, cudaStream_t stream,
                          const Source& source = {}) {
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  if ((in.of_transformed_group != nullptr) != kHadamard) {
    return {static_cast<int>(cudaErrorInvalidValue), "of_transformed_group: with a transform"};
  }
  return quantizing::launch_tiles("cudaLaunchKernelEx(amax)",
                                  &quantizing::amax_kernel<Source, kHadamard>, in, stream, source);
}

}  // namespace fusegen
