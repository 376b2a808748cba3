// Quantises what a generated expression gives: the quantise and amax kernels with a Source that
// computes its elements from the expression's operands, rounded as the pointwise kernel stores them.
// The tensor itself is neither written nor read, so an amax pass computes it once more.
//
// A result of two halves is one tensor with twice the columns. A result that is summed over rows
// leaves one partial sum per row and tile of columns, which a small kernel adds in order.
#pragma once

#include "fusegen/pointwise/math.cuh"
#include "fusegen/pointwise/pointwise.cuh"
#include "fusegen/pointwise/pointwise_quantize.h"
#include "fusegen/quantize/step.cuh"
#include "fusegen/launch/shared_memory.cuh"

namespace fusegen {

namespace quantizing {

// The result of `Math` with an access; -1 where it has none.
template <class Math>
constexpr int result_with(Access access) {
  for (int r = 0; r < Math::result_count; ++r) {
    if (Math::result(r).access == access) return r;
  }
  return -1;
}

template <class Element>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  Element pair[2];
  narrow(low, &pair[0]);
  narrow(high, &pair[1]);
  uint32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

// What a warp's lanes have of a few rows, summed: lane l ends with row l * rows / 32. Half of what
// is left changes hands at the first steps, in an order that is always the same.
template <int kRows>
__device__ __forceinline__ float sum_lanes(float (&rows)[kRows]) {
  int count = kRows;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const bool upper = threadIdx.x & distance;
    if (count == 1) {
      rows[0] += __shfl_xor_sync(kAll, rows[0], distance);
      continue;
    }
    count /= 2;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float sent = upper ? rows[i] : rows[i + count];
      const float kept = upper ? rows[i + count] : rows[i];
      rows[i] = kept + __shfl_xor_sync(kAll, sent, distance);
    }
  }
  return rows[0];
}

template <class Math_, class Config>
struct ExpressionSource {
  using Math = Math_;
  using Element = typename Config::Element;
  // Whose values wait in shared memory at once; random numbers take that, too.
  static constexpr int kRowsWaiting = Config::kStochastic ? 4 : 8;
  // That registers leave room for: gradients of long formulas and codes of 4 bits take most.
  static constexpr bool kLong = Math::operand_count > 2 && Math::cost > 48;
  static constexpr int kBlocksPerSm =
      kLong ? 2 : (Math::operand_count > 2 || Math::cost > 30 ? 3 : 4) - (Config::Format::kBits == 4);
  static_assert(sizeof(Shared<Config>) + kRowsWaiting * kThreads * sizeof(uint2) <= 48 << 10,
                "more shared memory than a kernel may have without asking");

  PointwiseArguments expression;
  float* row_partials;  // [tiles of columns, rows], or nullptr

  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments& in, int64_t row,
                                       int column, int rows) const {
    const bool second = kHalved && column >= int(expression.columns);
    load_half(values, row, column, rows, column < in.columns ? rows : 0, second,
              [](int, const Outcomes&) {});
  }

 protected:
  static constexpr int kOperands = Math::operand_count, kResults = Math::result_count;
  static constexpr int kWhole = result_with<Math>(Access::full);
  static constexpr int kSummed = result_with<Math>(Access::row);
  static constexpr bool kHalved = kWhole < 0;
  static constexpr int kLow = kHalved ? result_with<Math>(Access::first_half) : kWhole;
  static constexpr int kHigh = kHalved ? result_with<Math>(Access::second_half) : kWhole;
  static_assert(kLow >= 0 && kHigh >= 0, "a whole result or both halves of one are quantised");

  // Rows whose operands are under way: registers for no more.
  static constexpr int kRowsAtOnce = kOperands > 3 ? 2 : 4;

  using Outcomes = float[kResults][kLaneColumns];
  using Addresses = const char* [kOperands];

  // Operands of 4 elements of a row as they are loaded; an operand with fewer words leaves the rest.
  struct Operands {
    uint32_t words[kOperands][kLaneColumns];

    __device__ __forceinline__ float at(int o, int c) const {
      const Slot slot = Math::operand(o);
      if (slot.access == Access::row) c = 0;
      return slot.wide ? __uint_as_float(words[o][c]) : widen<Element>(words[o][c / 2], c % 2);
    }
  };

  // The values of one half; `also` sees the outcomes of every row.
  template <class Also>
  __device__ __forceinline__ void load_half(Values<Element>& values, int64_t row, int column,
                                            int rows, int count, bool second, Also also) const {
    __shared__ uint2 waiting[kRowsWaiting][kThreads];  // each thread's own
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kRowsWaiting) {
      evaluate(row + first, column, rows - first, count - first,
               [&](int r, const Outcomes& outcomes) {
                 waiting[r][threadIdx.x] = pairs_of(outcomes, second);
                 also(first + r, outcomes);
               });
#pragma unroll
      for (int r = 0; r < kRowsWaiting; ++r) {
        const uint2 pairs = first + r < count ? waiting[r][threadIdx.x] : make_uint2(0, 0);
        values.pairs[first + r][0] = pairs.x;
        values.pairs[first + r][1] = pairs.y;
      }
    }
  }

  // Calls `take` with the outcomes of kRowsWaiting rows from `row` on, as far as `rows` reach, and
  // leaves their sums; a lane has `count` of them, none where it is past the last column. What is
  // taken for a row or column that does not exist is anything. The loop stays one: unrolled, loads
  // of all its rows would take the registers of the values.
  template <class Take>
  __device__ __forceinline__ void evaluate(int64_t row, int column, int rows, int count,
                                           Take take) const {
    Addresses from;
    find(from, row, column);
    float* const partials = partials_of(row, column);
    const int summed = column < int(expression.columns) ? count : 0;  // not of a second half
#pragma unroll 1
    for (int first = 0; first < min(rows, kRowsWaiting); first += kRowsAtOnce) {
      Operands operands[kRowsAtOnce];
      float sums[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) load_row(operands[r], from, min(first + r, rows - 1));
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        Outcomes outcomes;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) apply(operands[r], outcomes, c);
        take(first + r, outcomes);
        sums[r] = first + r < summed ? sum_of(outcomes) : 0.0f;
      }
      if (partials != nullptr) store_sums(sums, partials + first, rows - first);
    }
  }

  // Where the operands of a lane's columns stand; past the last column, those of the last ones.
  __device__ __forceinline__ void find(Addresses& from, int64_t row, int column) const {
    const int columns = int(expression.columns);
    const int own = min(kHalved && column >= columns ? column - columns : column,
                        columns - kLaneColumns);
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      const Slot slot = Math::operand(o);
      const int64_t size = slot.wide ? sizeof(float) : sizeof(Element);
      from[o] = opaque(static_cast<const char*>(expression.operands[o]) +
                       pointwise::place(slot.access, row, own, columns) * size);
    }
  }

  __device__ __forceinline__ void load_row(Operands& operands, const Addresses& from,
                                           int row) const {
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      const Slot slot = Math::operand(o);
      const uint32_t elements = slot.access == Access::column ? 0
                                : slot.access == Access::row  ? 1
                                                              : uint32_t(expression.columns);
      const uint32_t size = slot.wide ? sizeof(float) : sizeof(Element);
      const uint32_t pitch = (pointwise::is_half(slot.access) ? 2 : 1) * elements * size;
      const char* const at = from[o] + uint64_t(pitch) * uint32_t(row);
      uint32_t(&words)[kLaneColumns] = operands.words[o];
      if (slot.access == Access::row) {
        words[0] = slot.wide ? __ldg(reinterpret_cast<const uint32_t*>(at))
                             : __ldg(reinterpret_cast<const uint16_t*>(at));
      } else if (slot.wide) {
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(at));
        words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
      } else {
        const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(at));
        words[0] = loaded.x, words[1] = loaded.y;
      }
    }
  }

  __device__ __forceinline__ void apply(const Operands& operands, Outcomes& outcomes, int c) const {
    float element[kOperands], outcome[kResults];
#pragma unroll
    for (int o = 0; o < kOperands; ++o) element[o] = operands.at(o, c);
    Math::apply(element, outcome, expression.scalars.data());
#pragma unroll
    for (int r = 0; r < kResults; ++r) outcomes[r][c] = outcome[r];
  }

  // Of one half, rounded to elements.
  __device__ __forceinline__ static uint2 pairs_of(const Outcomes& outcomes, bool second) {
    float values[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      values[c] = second ? outcomes[kHigh][c] : outcomes[kLow][c];
    }
    return make_uint2(narrow_pair<Element>(values[0], values[1]),
                      narrow_pair<Element>(values[2], values[3]));
  }

  // ---- sums over rows

  __device__ __forceinline__ static float sum_of(const Outcomes& outcomes) {
    float sum = 0.0f;
    if constexpr (kSummed >= 0) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum += outcomes[kSummed][c];
    }
    return sum;
  }

  // Of the tile of columns; nullptr where they are not wanted, or left by the first half's tiles.
  __device__ __forceinline__ float* partials_of(int64_t row, int column) const {
    const int64_t tile = column / kTileColumns;
    const bool leaves = kSummed >= 0 && tile * kTileColumns < expression.columns;
    return leaves && row_partials != nullptr ? row_partials + tile * expression.rows + row : nullptr;
  }

  __device__ __forceinline__ static void store_sums(float (&sums)[kRowsAtOnce], float* to,
                                                    int rows) {
    constexpr int kSharing = 32 / kRowsAtOnce;  // lanes
    const int lane = threadIdx.x % 32;
    const float sum = sum_lanes(sums);
    if (lane % kSharing == 0 && lane / kSharing < rows) to[lane / kSharing] = sum;
  }
};

// A result of two halves.
template <class Math, class Config>
struct HalvesSource : ExpressionSource<Math, Config> {
  using Base = ExpressionSource<Math, Config>;
  // And shared memory, for second halves.
  static constexpr int kBlocksPerSm = Base::kBlocksPerSm < 3 ? Base::kBlocksPerSm : 3;
  static constexpr int kSharedBytes = kWarpRows * kThreads * int(sizeof(uint2));
};

// One of them: the first one is computed, and leaves the second in `parked`, each thread its own.
template <class Base>
struct HalfSource : Base {
  using Element = typename Base::Element;
  uint2* parked;
  bool second;

  __device__ HalfSource(const Base& both, uint2* parked, bool second)
      : Base(both), parked(parked + threadIdx.x), second(second) {}

  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments&, int64_t row,
                                       int column, int rows) const {
    if (!second) {
      this->load_half(values, row, column, rows, rows, false,
                      [&](int r, const typename Base::Outcomes& outcomes) {
                        parked[r * kThreads] = Base::pairs_of(outcomes, true);
                      });
      return;
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const uint2 pairs = r < rows ? parked[r * kThreads] : make_uint2(0, 0);
      values.pairs[r][0] = pairs.x;
      values.pairs[r][1] = pairs.y;
    }
  }
};

template <class Config, class Source>
__global__ void __launch_bounds__(kThreads, kBlocks<Config, Source>)
    quantize_halves_kernel(const __grid_constant__ QuantizeArguments in,
                           const __grid_constant__ Source source) {
  extern __shared__ uint2 parked[];
  __shared__ Shared<Config> shared;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const int32_t tile = row_tile_from_last();
  const Space space = work_space<Config>(in);
  if (tile >= row_tiles(groups, space)) return;
  tile_slices(groups, space, tile, shared.slices);
  int32_t first_column = (gridDim.y - 1 - blockIdx.y) * kTileColumns;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    TileQuantizer<Config>(in, groups, tile, first_column, shared)
        .run(HalfSource<typename Source::Base>(source, parked, half == 1), half == 0);
    first_column += int32_t(in.columns) / 2;
    __syncthreads();
  }
}

// Adds the partial sums of rows. Rows past all groups belong to no tile, and their sum is zero.
struct RowTotalArguments {
  const float* partials;  // [tiles, rows]
  void* output;           // [rows]
  const int64_t* group_sizes;
  int64_t rows;
  int64_t groups;
  int64_t tiles;
};

// Rows of all groups, for every thread of the block; `scratch` has a number for every warp.
__device__ inline int64_t rows_in_groups(const RowTotalArguments& in, int64_t* scratch) {
  if (in.group_sizes == nullptr) return in.rows;
  int64_t found = 0;
  for (int64_t g = threadIdx.x; g < in.groups; g += kThreads) {
    found += min(max(in.group_sizes[g], int64_t(0)), in.rows);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    found += __shfl_xor_sync(kAll, found, distance);
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = found;
  __syncthreads();
  int64_t all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all += scratch[w];
  return min(all, in.rows);
}

template <class Output>
__global__ void __launch_bounds__(kThreads)
    row_total_kernel(const __grid_constant__ RowTotalArguments in) {
  __shared__ int64_t scratch[kWarps];
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  const int64_t end = rows_in_groups(in, scratch);
  let_next_kernel_start();
  if (row >= in.rows) return;
  float total = 0.0f;
  if (row < end) {
#pragma unroll 8
    for (int64_t tile = 0; tile < in.tiles; ++tile) total += in.partials[tile * in.rows + row];
  }
  narrow(total, static_cast<Output*>(in.output) + row);
}

template <class Math, class Element>
Status add_row_partials(const PointwiseQuantizeArguments& in, Stream& stream) {
  constexpr int kSummed = result_with<Math>(Access::row);
  RowTotalArguments total{};
  total.partials = in.row_partials;
  total.output = in.expression.results[kSummed];
  total.group_sizes = in.step.quantize.group_sizes;
  total.rows = in.expression.rows;
  total.groups = in.step.quantize.groups;
  total.tiles = (in.expression.columns + kTileColumns - 1) / kTileColumns;
  const Grid grid{dim3(unsigned((total.rows + kThreads - 1) / kThreads)), kThreads};
  constexpr auto* kernel =
      Math::result(kSummed).wide ? &row_total_kernel<float> : &row_total_kernel<Element>;
  return launch_kernel("cudaLaunchKernelEx(row_total)", kernel, grid, stream, total);
}

// For the sake of the sums: an amax that nobody asks for.
template <class Source>
Status evaluate(const QuantizeArguments& in, Stream& stream, const Source& source) {
  return launch_tiles("cudaLaunchKernelEx(evaluate)", &row_amax_kernel<Source>, amax_arguments(in),
                      Space{int32_t(in.row_align), int32_t(in.rows)}, stream, source);
}

}  // namespace quantizing

// Of a result of two halves: both at once, unless a tile of columns is part of both.
template <class Config, class Math, class Same>
static Status launch_quantize(const QuantizeArguments& in, Stream& stream,
                              const quantizing::HalvesSource<Math, Same>& source) {
  using namespace quantizing;
  using Source = HalvesSource<Math, Same>;
  static std::atomic<uint64_t> allowed{0};
  if (source.expression.columns % kTileColumns != 0) {
    return launch_quantize<Config, typename Source::Base>(in, stream, source);
  }
  if (Status status = check_rows(in); !status.ok()) return status;
  if (const char* broken = broken_requirement<Config>(in)) {
    return {static_cast<int>(cudaErrorInvalidValue), broken};
  }
  const auto kernel = &quantize_halves_kernel<Config, Source>;
  Status status = allow_shared_memory(kernel, Source::kSharedBytes, allowed);
  if (!status.ok()) return status;
  return launch_tiles<2 * kTileColumns, Source::kSharedBytes>(
      "cudaLaunchKernelEx(quantize_halves)", kernel, in, work_space<Config>(in), stream, source);
}

template <class Config, class Math>
static Status launch_pointwise_quantize(const PointwiseQuantizeArguments& in, Stream& stream) {
  using namespace quantizing;
  constexpr bool kHalved = result_with<Math>(Access::first_half) >= 0;
  std::conditional_t<kHalved, HalvesSource<Math, Config>, ExpressionSource<Math, Config>> source{};
  source.expression = in.expression;
  source.row_partials = in.row_partials;
  const Status status = in.quantizes ? launch_quantize_step<Config>(in.step, stream, source)
                                     : evaluate(in.step.quantize, stream, source);
  if constexpr (result_with<Math>(Access::row) >= 0) {
    if (status.ok() && in.row_partials != nullptr && in.expression.rows > 0) {
      return add_row_partials<Math, typename Config::Element>(in, stream);
    }
  }
  return status;
}

}  // namespace fusegen
