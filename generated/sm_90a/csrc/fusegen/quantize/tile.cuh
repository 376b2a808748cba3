// What the quantise and amax kernels share: a tile of 128 rows and 128 columns in registers.
//
// 8 warps own a slice of 16 rows each, a lane 4 neighbouring columns, so that a warp reads and writes whole
// lines, 16 rows of a column (a block, or half of one) stay in one thread, and a row in one warp.
// Amaxes are taken on packed pairs of 16-bit elements: max keeps the operand that is not NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "fusegen/launch/launch.cuh"
#include "fusegen/quantize/math.cuh"
#include "fusegen/quantize/pairs.cuh"
#include "fusegen/quantize/places.cuh"
#include "fusegen/common/status.h"

namespace fusegen {

namespace quantizing {

inline constexpr unsigned kAll = 0xffffffffu;
inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kWarpRows = 16;
inline constexpr int kLaneColumns = 4;
inline constexpr int kTileColumns = 32 * kLaneColumns;
// Row tiles that run side by side: their pieces of transposed lines are neighbours in memory.
inline constexpr int kSuperRow = 8;
static_assert(kWarps == kSlices && kWarpRows == kSliceRows);
static_assert(kTileColumns == 128, "a block of 128 columns is one tile");

// Walks groups, kChunk at a time: `visit(group, begin, end)` is called with the rows of each, by the
// lane that holds it, and after the last one with the pseudo-group's; `done(group, begin)` ends the
// walk before that group. Called by one whole warp of a ragged launch.
template <class Visit, class Done>
__device__ __forceinline__ void walk_groups(const RowGroups& groups, int lane, Visit visit,
                                            Done done) {
  int32_t before = 0;
#pragma unroll 1
  for (int32_t chunk = 0; chunk < groups.groups; chunk += kChunk) {
    const LaneGroups own = lane_groups(groups, chunk, lane);
    int32_t end = own.all(groups.rows);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t rows = __shfl_up_sync(kAll, end, distance);
      if (lane >= distance) end = sum_to(end, rows, groups.rows);
    }
    const int32_t begin = __shfl_up_sync(kAll, end, 1);
    own.each(lane == 0 ? before : sum_to(before, begin, groups.rows), groups.rows, visit);
    before = sum_to(before, __shfl_sync(kAll, end, 31), groups.rows);
    if (done(chunk + kChunk, before)) return;
  }
  if (lane == 0) visit(groups.groups, before, groups.rows);
}

// Slices of tile `tile` of a ragged launch, into shared memory, by one whole warp.
__device__ inline void find_slices(const RowGroups& groups, Space space, int32_t tile, int lane,
                                   Slice* slices) {
  const int32_t first = tile * kTileRows;
  walk_groups(
      groups, lane,
      [&](int32_t group, int32_t begin, int32_t end) {
        mark_slices(groups, space, first, group, begin, end, slices);
      },
      [&](int32_t group, int32_t begin) {
        return group < groups.groups && start_of(begin, group, space) >= first + kTileRows;
      });
}

// The slices of a tile, for all threads of the block: in shared memory, since registers are what
// the kernels lack. No thread may still read those of another tile.
using TileSlices = Slice[kSlices];

// Called by one whole warp.
__device__ inline void write_slices(const RowGroups& groups, Space space, int32_t tile, int lane,
                                    TileSlices& slices) {
  if (groups.ragged()) {
    find_slices(groups, space, tile, lane, slices);
  } else if (lane < kSlices) {
    slices[lane] = matrix_slice(groups, space, tile, lane);
  }
}

// Called by the whole block.
__device__ inline void tile_slices(const RowGroups& groups, Space space, int32_t tile,
                                   TileSlices& slices) {
  if (threadIdx.x < 32) write_slices(groups, space, tile, threadIdx.x, slices);
  __syncthreads();
}

// Which slices of the tile are of a group, a bit for each. Called by whole warps.
__device__ __forceinline__ uint32_t slices_of(const TileSlices& slices, int32_t group, int lane) {
  return __ballot_sync(kAll, lane < kSlices && slices[lane % kSlices].group == group);
}

// A global address whose origin is hidden. Otherwise the compiler puts every row's address together
// anew from the block's and the warp's first rows, four instructions where one is enough.
template <class T>
__device__ __forceinline__ T* opaque(T* address) {
#ifdef __CUDA_ARCH__
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

// A value that is computed where this stands. Otherwise the compiler moves all that leads to a
// store behind the store's condition, and rows wait for each other.
__device__ __forceinline__ uint32_t here(uint32_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// ---- one element

__device__ inline void narrow(float value, float* to) { *to = value; }
__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }

// Whether a lane of the warp has a NaN.
template <class Element>
__device__ __forceinline__ bool any_nan(uint32_t pair) {
  const float sum = widen_low<Element>(pair) + widen_high<Element>(pair);
  return __any_sync(kAll, sum != sum);
}

// ---- a thread's part of the tile

template <class Element>
struct Values {
  uint32_t pairs[kWarpRows][2];  // 4 columns of each of 16 rows

  __device__ __forceinline__ float at(int row, int column) const {
    return widen<Element>(pairs[row][column / 2], column % 2);
  }

  // Makes NaN positive, where a lane of the warp has any.
  __device__ __forceinline__ void quiet_nans() {
    uint32_t largest = pairs[0][0];
#pragma unroll
    for (auto& row : pairs) {
      for (uint32_t pair : row) largest = maximum_or_nan<Element>(largest, pair);
    }
    if (any_nan<Element>(largest)) quiet_all();
  }

  __device__ __forceinline__ void quiet_all() {
#pragma unroll
    for (auto& row : pairs) {
      for (uint32_t& pair : row) pair = quiet<Element>(pair);
    }
  }

  // Signs of two rows as nibbles, in order.
  __device__ __forceinline__ uint32_t row_signs(int row) const {
    return signs_along({pairs[row][0], pairs[row][1], pairs[row + 1][0], pairs[row + 1][1]});
  }

  // The same of columns 0, 2, 1 and 3, a byte for each.
  __device__ __forceinline__ uint32_t transposed_signs(int row) const {
    return nibbles_of(sign_bytes(pairs[row][0], pairs[row][1]), sign_bytes(pairs[row + 1][0], pairs[row + 1][1]));
  }

  // The same of 8 rows of columns 2i and 2i + 1.
  __device__ __forceinline__ uint2 column_signs(int row, int i) const {
    uint32_t fours[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t even = sign_bytes(pairs[row + 4 * k][i], pairs[row + 4 * k + 2][i]);
      const uint32_t odd = sign_bytes(pairs[row + 4 * k + 1][i], pairs[row + 4 * k + 3][i]);
      fours[k] = nibbles_of(even, odd);
    }
    return make_uint2(__byte_perm(fours[0], fours[1], 0x5410), __byte_perm(fours[0], fours[1], 0x7632));
  }

  template <bool kNan>
  __device__ __forceinline__ uint32_t row_largest(int row) const {
    return larger_magnitude<Element, kNan>(comparable<Element>(pairs[row][0]), comparable<Element>(pairs[row][1]));
  }

  // The largest of this thread's rows 2i (low) and 2i + 1 (high).
  template <bool kNan>
  __device__ __forceinline__ uint32_t row_pair_largest(int i) const {
    const uint32_t even = row_largest<kNan>(2 * i), odd = row_largest<kNan>(2 * i + 1);
    return larger_magnitude<Element, kNan>(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
  }

  // Amaxes of columns 2i (low) and 2i + 1 (high).
  __device__ __forceinline__ uint32_t column_pair_amax(int i) const {
    uint32_t largest = comparable<Element>(pairs[0][i]);
#pragma unroll
    for (int r = 1; r < kWarpRows; ++r) {
      largest = larger_magnitude<Element>(largest, comparable<Element>(pairs[r][i]));
    }
    return amax_of<Element>(largest);
  }

  __device__ __forceinline__ float amax() const {
    const uint32_t pair = maximum<Element>(column_pair_amax(0), column_pair_amax(1));
    return fmaxf(widen_low<Element>(pair), widen_high<Element>(pair));
  }
};

// Largest of non-negative values over a warp.
__device__ __forceinline__ float warp_amax(float value) {
  return __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(value)));
}

__device__ __forceinline__ void raise(float* to, float amax) {
  if (amax > 0.0f) atomicMax(reinterpret_cast<unsigned*>(to), __float_as_uint(amax));
}

// Amaxes of a warp's 16 rows over runs of Lanes lanes, spread over those lanes: half of what is
// left changes hands at every step. Lane l of a run ends with the pairs of rows
// [first_pair, first_pair + kPairs); with 16 lanes two lanes, with 32 four, end with the same.
template <class Element, int Lanes>
struct RowAmaxes {
  static_assert(Lanes == 4 || Lanes == 8 || Lanes == 16 || Lanes == 32);
  static constexpr int kPairs = Lanes >= 8 ? 1 : 8 / Lanes;
  static constexpr int kCopies = Lanes >= 8 ? Lanes / 8 : 1;

  uint32_t pairs[8];

  __device__ __forceinline__ static int first_pair(int lane) {
    return lane % Lanes / kCopies * kPairs;
  }

  __device__ __forceinline__ explicit RowAmaxes(const Values<Element>& values)
      : RowAmaxes(values, std::false_type()) {}

  // Those of rows with NaN are NaN, if so wanted.
  template <bool kNan>
  __device__ __forceinline__ RowAmaxes(const Values<Element>& values, std::bool_constant<kNan>) {
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = values.template row_pair_largest<kNan>(i);
    int count = 8;
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
      const bool upper = threadIdx.x & distance;
      if (count == 1) {
        pairs[0] = larger_magnitude<Element, kNan>(pairs[0], __shfl_xor_sync(kAll, pairs[0], distance));
        continue;
      }
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const uint32_t sent = upper ? pairs[i] : pairs[i + count];
        const uint32_t kept = upper ? pairs[i + count] : pairs[i];
        pairs[i] = larger_magnitude<Element, kNan>(kept, __shfl_xor_sync(kAll, sent, distance));
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = kNan ? magnitude<Element>(pairs[i]) : amax_of<Element>(pairs[i]);
    }
  }

  // Whether a lane of the warp has a NaN.
  __device__ __forceinline__ bool any_nan() const {
    uint32_t largest = pairs[0];
#pragma unroll
    for (int i = 1; i < kPairs; ++i) largest = maximum_or_nan<Element>(largest, pairs[i]);
    return quantizing::any_nan<Element>(largest);
  }
};

inline bool is_alignment(int64_t rows) {
  return rows >= kSliceRows && rows <= kTileRows && (rows & (rows - 1)) == 0;
}

template <class Arguments>
Status check_rows(const Arguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  constexpr int64_t kMostRows = int64_t(1) << 30;
  if (in.rows < 0 || in.rows > kMostRows) return {kInvalid, "0 <= rows <= 2^30"};
  if (in.groups < 1 || in.groups > 65535) return {kInvalid, "1 <= groups <= 65535"};
  if (in.columns < kRowAlignment || in.columns % kRowAlignment != 0) {
    return {kInvalid, "columns: a multiple of 8"};
  }
  return {};
}

// Row tiles of a super-row: x, column tiles: y, super-rows: z.
__device__ __forceinline__ int32_t row_tile() { return blockIdx.z * kSuperRow + blockIdx.x; }

// The same from the last to the first: the end of what a kernel before this one has read or written
// is still in the L2 cache.
__device__ __forceinline__ int32_t row_tile_from_last() {
  return (gridDim.z - 1 - blockIdx.z) * kSuperRow + (kSuperRow - 1 - blockIdx.x);
}

// Blocks of threads of a tensor: one per tile of 128 rows and `width` columns.
struct TileGrid {
  int64_t super_rows, column_tiles;
};

template <int width, class Arguments>
TileGrid tile_grid(const Arguments& in, Space space) {
  const int64_t tiles = row_tiles({in.group_sizes, int32_t(in.rows), int32_t(in.groups)}, space);
  return {(tiles + kSuperRow - 1) / kSuperRow, (in.columns + width - 1) / width};
}

inline constexpr int64_t kMostSuperRows = 65535;  // of a grid's z

inline Status check_grid(const TileGrid& grid) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (grid.super_rows > kMostSuperRows) return {kInvalid, "at most 65535 * 8 tiles of 128 rows"};
  if (grid.column_tiles > 65535) return {kInvalid, "columns: at most 65535 tiles"};
  return {};
}

template <int width = kTileColumns, int kSharedBytes = 0, class Arguments, class... Sources>
Status launch_tiles(const char* call, void (*kernel)(Arguments, Sources...), const Arguments& in,
                    Space space, Stream& stream, const Sources&... source) {
  const TileGrid grid = tile_grid<width>(in, space);
  if (Status status = check_grid(grid); !status.ok()) return status;
  const dim3 blocks(kSuperRow, unsigned(grid.column_tiles), unsigned(grid.super_rows));
  return launch_kernel(call, kernel, Grid{blocks, kThreads, kSharedBytes}, stream, in, source...);
}

}  // namespace quantizing

}  // namespace fusegen
