// Largest magnitudes of groups, rows and columns, from one read of the input in the quantise
// kernels' tiles.
//
// Of groups: a fixed number of blocks walk the tiles side by side and leave a partial amax of every
// group that they meet; the quantise kernel takes the largest of the few that its groups have. So
// nothing is cleared before and no kernel comes between, and what was read last, which the L2 cache
// holds, is the end of the input.
//
// Of rows and columns: there would be a partial for every 128 elements, so a block raises each
// result with an integer atomicMax, which orders non-negative floats as numbers do. Results start
// at zero: `launch_clear` (quantize/state.cuh).
#pragma once

#include "fusegen/quantize/quantize.h"
#include "fusegen/quantize/source.cuh"
#include "fusegen/quantize/tile.cuh"

namespace fusegen {

namespace quantizing {

// ---- of groups

// The partials of a group are those of blocks first, first + 1, ..., modulo kAmaxPartials: tiles
// are dealt out to blocks one by one, a row of tiles after the other.
struct PartialRange {
  int32_t first, count;

  __device__ __forceinline__ int32_t block(int32_t i) const {
    const int32_t at = first + i;
    return at < kAmaxPartials ? at : at - kAmaxPartials;
  }
};

// Blocks of the amax kernel that share an SM: as many as its registers leave room for. All are
// there at once on 132 of them.
template <class Source>
inline constexpr int kAmaxBlocks = Source::kBlocksPerSm < 3 ? Source::kBlocksPerSm : 3;
static_assert(kAmaxPartials <= 3 * 132);

__host__ __device__ inline int32_t tiles_across(int64_t columns) {
  return int32_t((columns + kTileColumns - 1) / kTileColumns);
}

__device__ inline PartialRange partials_of(const RowGroups& groups, const Slice& slice,
                                           int32_t align, int32_t across) {
  const TileRange tiles = tiles_with_rows(groups, slice, Space{align, groups.rows});
  const int64_t first = int64_t(tiles.first) * across;
  const int64_t count = int64_t(tiles.end - tiles.first) * across;
  return {int32_t(first % kAmaxPartials), int32_t(count < kAmaxPartials ? count : kAmaxPartials)};
}

// After the transform of every 16 rows of a column. What comes last there, rounding, keeps the order
// of magnitudes, and is left to the largest.
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
  return round_to_bfloat16(amax);
}

// Of tiles that take turns: while one is reduced, the next is loaded.
struct GroupAmaxShared {
  float amaxes[2][2][kWarps];  // of the elements, and after the transform
  TileSlices slices[2];

  // A warp's, of the tile of this turn.
  template <bool kHadamard, class Element>
  __device__ __forceinline__ void put(const Values<Element>& values, int turn, int warp, int lane) {
    const float amax = warp_amax(values.amax());
    float transformed = 0.0f;
    if constexpr (kHadamard) transformed = warp_amax(transformed_amax(values));
    if (lane != 0) return;
    amaxes[turn][0][warp] = amax;
    amaxes[turn][1][warp] = transformed;
  }
};

// The running amax of the last group that a block has met: groups come in order, in a tile and from
// tile to tile. Lanes 0 to 7 have the elements' of each slice, lanes 8 to 15 those after the
// transform; every lane of an eight keeps the same.
struct GroupRun {
  float* partials;  // of the lane's kind, nullptr: not wanted
  int32_t end;      // groups: rows past them count for nothing
  int32_t group;
  float amax = 0.0f;

  __device__ void add(int32_t own_group, float own, int slice) {
    float largest = own;
#pragma unroll
    for (int distance = 1; distance < kSlices; distance *= 2) {
      const float before = __shfl_up_sync(kAll, largest, distance, kSlices);
      const int32_t its = __shfl_up_sync(kAll, own_group, distance, kSlices);
      if (slice >= distance && its == own_group) largest = fmaxf(largest, before);
    }
    if (slice == 0 && own_group != group) store(group, amax);
    if (own_group == group) largest = fmaxf(largest, amax);
    const int32_t next = __shfl_down_sync(kAll, own_group, 1, kSlices);
    if (slice + 1 < kSlices && next != own_group) store(own_group, largest);
    group = __shfl_sync(kAll, own_group, kSlices - 1, kSlices);
    amax = __shfl_sync(kAll, largest, kSlices - 1, kSlices);
  }

  __device__ void store(int32_t of_group, float value) const {
    if (partials == nullptr || of_group >= end) return;
    partials[int64_t(of_group) * kAmaxPartials + blockIdx.x] = value;
  }
};

template <class Source, bool kHadamard>
__global__ void __launch_bounds__(kThreads, kAmaxBlocks<Source>)
    group_amax_kernel(const __grid_constant__ AmaxArguments in,
                      const __grid_constant__ Source source) {
  __shared__ GroupAmaxShared shared;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  const Space space{int32_t(in.row_align), groups.rows};
  const int32_t across = tiles_across(in.columns);
  const int32_t tiles = row_tiles(groups, space) * across;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kind = lane / kSlices % 2;
  wait_for_previous_kernel();
  tile_slices(groups, space, int32_t(blockIdx.x) / across, shared.slices[0]);
  GroupRun run{lane >= 2 * kSlices ? nullptr : kind == 0 ? in.of_group : in.of_transformed_group,
               groups.groups, shared.slices[0][0].group};
  int turn = 0;
#pragma unroll 1
  for (int32_t tile = blockIdx.x; tile < tiles; turn ^= 1) {
    const Slice& slice = shared.slices[turn][warp];
    const int32_t column = tile % across;
    Values<typename Source::Element> values;
    source.load(values, in, input_row(groups, slice), column * kTileColumns + lane * kLaneColumns,
                slice.group == groups.groups ? 0 : slice.rows());
    tile += gridDim.x;
    if (warp == 0) write_slices(groups, space, tile / across, lane, shared.slices[turn ^ 1]);
    shared.put<kHadamard>(values, turn, warp, lane);
    __syncthreads();
    if (warp == 0) {
      run.add(shared.slices[turn][lane % kSlices].group, shared.amaxes[turn][kind][lane % kSlices],
              lane % kSlices);
    }
  }
  let_next_kernel_start();
  if (warp == 0 && lane % kSlices == 0) run.store(run.group, run.amax);
}

// ---- of rows and columns

template <class Element>
__device__ void raise_rows(float* of_rows, const Values<Element>& values, int rows) {
  const RowAmaxes<Element, 32> amaxes(values);
  const int lane = threadIdx.x % 32;
  const int row = 2 * amaxes.first_pair(lane) + lane % 2;
  const uint32_t pair = amaxes.pairs[0];
  if (lane % 4 >= 2 || row >= rows) return;
  raise(of_rows + row, widen<Element>(pair, lane % 2));
}

using PackedColumns = uint2[kWarps][32];  // packed amaxes of 4 columns

// A thread has a column: its warps' amaxes, raised where a group ends.
template <class Element>
__device__ void raise_columns(float* of_columns, int32_t columns, int32_t first_column,
                              const RowGroups& groups, const TileSlices& slices,
                              const PackedColumns& amaxes) {
  const int column = threadIdx.x;
  if (column >= min(columns - first_column, kTileColumns)) return;
  uint32_t pair = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int32_t group = slices[w].group;
    pair = maximum<Element>(pair, reinterpret_cast<const uint32_t*>(amaxes[w])[column / 2]);
    if (group == groups.groups || (w + 1 < kWarps && slices[w + 1].group == group)) continue;
    raise(of_columns + int64_t(group) * columns + first_column + column,
          widen<Element>(pair, column % 2));
    pair = 0;
  }
}

template <class Source>
__global__ void __launch_bounds__(kThreads, Source::kBlocksPerSm)
    row_amax_kernel(const __grid_constant__ AmaxArguments in,
                    const __grid_constant__ Source source) {
  using Element = typename Source::Element;
  __shared__ TileSlices slices;
  __shared__ PackedColumns of_columns;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  const Space space{int32_t(in.row_align), groups.rows};
  wait_for_previous_kernel();
  if (row_tile() >= row_tiles(groups, space)) return;
  tile_slices(groups, space, row_tile(), slices);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Slice slice = slices[warp];
  const int rows = slice.group == groups.groups ? 0 : slice.rows();
  const int64_t row = input_row(groups, slice);
  const int32_t first_column = blockIdx.y * kTileColumns;
  Values<Element> values;
  source.load(values, in, row, first_column + lane * kLaneColumns, rows);
  let_next_kernel_start();
  if (in.of_row != nullptr) raise_rows(in.of_row + row, values, rows);
  if (in.of_column == nullptr) return;
  of_columns[warp][lane] = make_uint2(values.column_pair_amax(0), values.column_pair_amax(1));
  __syncthreads();
  raise_columns<Element>(in.of_column, int32_t(in.columns), first_column, groups, slices,
                         of_columns);
}

}  // namespace quantizing

// `of_transformed_group` is written where kHadamard, and only there.
template <class Element, bool kHadamard = false, class Source = TensorSource<Element>>
static Status launch_amax(const AmaxArguments& in, Stream& stream, const Source& source = {}) {
  using namespace quantizing;
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (Status status = check_rows(in); !status.ok()) return status;
  if (!is_alignment(in.row_align)) return {kInvalid, "row_align: a power of two, 16 to 128 rows"};
  if ((in.of_transformed_group != nullptr) != kHadamard) {
    return {kInvalid, "of_transformed_group: with a transform"};
  }
  const Space space{int32_t(in.row_align), int32_t(in.rows)};
  if (in.of_row != nullptr || in.of_column != nullptr) {
    return launch_tiles("cudaLaunchKernelEx(row_amax)", &row_amax_kernel<Source>, in, space, stream,
                        source);
  }
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  const int64_t tiles = int64_t(row_tiles(groups, space)) * tiles_across(in.columns);
  const Grid grid{dim3(unsigned(tiles < kAmaxPartials ? tiles : kAmaxPartials)), kThreads};
  return launch_kernel("cudaLaunchKernelEx(group_amax)", &group_amax_kernel<Source, kHadamard>,
                       grid, stream, in, source);
}

}  // namespace fusegen
