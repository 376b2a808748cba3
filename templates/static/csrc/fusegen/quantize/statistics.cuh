// Statistics of a quantised copy: what it lost of the tensor that it was made from.
//
// Blocks of threads take turns at tiles of 128 rows and 128 columns of the tensor, as the quantise
// kernel had them, and read the codes that it wrote for them. Every thread adds up what it sees in
// float64, blocks leave their sums in a workspace, and one block adds those: the order is fixed by
// the number of blocks, so that results repeat bit for bit.
#pragma once

#include <type_traits>

#include "fusegen/quantize/dequantize.cuh"
#include "fusegen/quantize/config.cuh"
#include "fusegen/quantize/source.cuh"
#include "fusegen/quantize/tile.cuh"
#include "fusegen/quantize/statistics.h"

namespace fusegen {

template <class Element_, class Format_, class Scaling_, bool columnwise, bool transformed,
          bool atoms = false>
struct StatisticsConfig {
  using Element = Element_;
  using Format = Format_;
  using Scaling = Scaling_;
  static constexpr Rule kRule = Scaling::kRule;
  static constexpr int kBlock = Scaling::kBlock;  // 0: not in blocks
  static constexpr bool kSquare = Scaling::kSquare;
  static constexpr bool kColumnwise = columnwise;
  static constexpr bool kHadamard = transformed;  // the copy is of a transform
  static constexpr bool kAtoms = atoms;           // scales lie as scale_atoms.cuh says
  static constexpr bool kUntransposed = false;

  static_assert(!transformed || columnwise, "transforms run along rows");
};

// Of a columnwise copy that lies as the tensor does: see untransposed.cuh.
template <class Config>
struct OfUntransposed : Config {
  static constexpr bool kUntransposed = true;
  static_assert(Config::kColumnwise && !Config::kHadamard);
};

namespace quantizing {

struct Tally {
  double error = 0.0, total = 0.0;  // sums of squares
  int64_t nonzero = 0, underflow = 0, saturation = 0;
  float amax = 0.0f;

  // Halves of the last step below the largest value that it consists of.
  template <class Format>
  static constexpr int kTop =
      2 * ((1 << Format::kMantissa) | (Format::kLargest & ((1u << Format::kMantissa) - 1)));

  template <class Format>
  __device__ __forceinline__ void add(float source, float decoded, uint32_t code) {
    constexpr uint32_t kMagnitude = (1u << (Format::kBits - 1)) - 1;
    const float magnitude = fabsf(source), kept = fabsf(decoded);
    const double difference = double(decoded) - double(source);
    error += difference * difference;
    total += double(source) * double(source);
    nonzero += source != 0.0f;
    underflow += source != 0.0f && decoded == 0.0f;
    saturation += (code & kMagnitude) == Format::kLargest &&
                  (magnitude - kept) * float(kTop<Format>) > kept;
    amax = fmaxf(amax, magnitude);  // of a number and NaN, the number
  }

  __device__ __forceinline__ void merge(const Tally& other) {
    error += other.error;
    total += other.total;
    nonzero += other.nonzero;
    underflow += other.underflow;
    saturation += other.saturation;
    amax = fmaxf(amax, other.amax);
  }

  __device__ __forceinline__ Tally of_lane(int distance) const {
    Tally other;
    other.error = __shfl_xor_sync(kAll, error, distance);
    other.total = __shfl_xor_sync(kAll, total, distance);
    other.nonzero = __shfl_xor_sync(kAll, nonzero, distance);
    other.underflow = __shfl_xor_sync(kAll, underflow, distance);
    other.saturation = __shfl_xor_sync(kAll, saturation, distance);
    other.amax = __shfl_xor_sync(kAll, amax, distance);
    return other;
  }
};

// The tally of all threads, for thread 0; `shared` has one of every warp.
__device__ inline Tally tally_of_block(Tally tally, Tally* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) tally.merge(tally.of_lane(distance));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = tally;
  __syncthreads();
  if (threadIdx.x != 0) return tally;
#pragma unroll 1
  for (int w = 1; w < kWarps; ++w) tally.merge(shared[w]);
  return tally;
}

// A warp's slice of a tile of the tensor, and of its copy.
template <class Config>
class TileReader {
 public:
  __device__ TileReader(const StatisticsArguments& in, const RowGroups& groups, const Slice& slice,
                        int32_t first_column)
      : in_(in),
        groups_(groups),
        slice_(slice),
        columns_(int32_t(in.columns)),
        column_(first_column + int32_t(threadIdx.x) % 32 * kLaneColumns),
        row_(input_row(groups, slice)),
        place_(place_of(groups, slice, Space{int32_t(in.row_align), 0})) {
    TensorSource<Element>().load(values_, in, row_, column_, slice.rows());
    if constexpr (Config::kRule == Rule::nvfp4) {
      whole_ = 1.0f / nvfp4_tensor_scale(in.amax[slice.group]);
    }
  }

  __device__ __forceinline__ void count(Tally& tally) const {
    if (column_ >= columns_ || slice_.rows() == 0) return;
    if constexpr (Config::kColumnwise && !Config::kUntransposed) {
      count_columns(tally);
    } else {
      count_rows(tally);
    }
  }

 private:
  using Element = typename Config::Element;
  using Format = typename Config::Format;
  static constexpr uint32_t kCode = (1u << Format::kBits) - 1;
  static constexpr int kPerWord = 32 / Format::kBits;

  // Codes of 4 neighbouring columns.
  __device__ __forceinline__ void count_rows(Tally& tally) const {
    using Codes = std::conditional_t<Format::kBits == 8, uint32_t, uint16_t>;
    const int rows = slice_.rows();
    const auto* codes = static_cast<const uint8_t*>(in_.data) +
                        row_ * in_.pitch + column_ * Format::kBits / 8;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (r >= rows) continue;
      const uint32_t word = *reinterpret_cast<const Codes*>(codes + r * in_.pitch);
      const float scale = Config::kUntransposed ? 0.0f : scale_of(r, column_);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const float own = Config::kUntransposed ? scale_of(r, column_ + c) : scale;
        count_one(tally, values_.at(r, c), word >> (c * Format::kBits) & kCode, own);
      }
    }
  }

  // Codes of 16 neighbouring rows: those past the group's last one are padding, which a transform
  // fills, and are all zeros otherwise.
  __device__ __forceinline__ void count_columns(Tally& tally) const {
    const int64_t matrix = groups_.ragged() ? 0 : slice_.group;
    const int64_t line = matrix * in_.columns + column_;
    const auto* codes = static_cast<const uint8_t*>(in_.data) + line * in_.pitch +
                        int64_t(place_) * Format::kBits / 8;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const auto* words = reinterpret_cast<const uint32_t*>(codes + c * in_.pitch);
      const float scale = scale_of(0, column_ + c);
      float run[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] = values_.at(r, c);
      if constexpr (Config::kHadamard) hadamard(run);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const uint32_t code = words[r / kPerWord] >> (r % kPerWord * Format::kBits) & kCode;
        count_one(tally, run[r], code, scale);
      }
    }
  }

  __device__ __forceinline__ void count_one(Tally& tally, float source, uint32_t code,
                                            float scale) const {
    tally.add<Format>(source, decode<Format>(code) * scale * whole_, code);
  }

  // The scale of an element, its row counted in the slice.
  __device__ __forceinline__ float scale_of(int32_t row, int32_t column) const {
    return scale_at<typename Config::Scaling>(in_.scale, scale_index(row, column));
  }

  __device__ __forceinline__ int64_t scale_index(int32_t row, int32_t column) const {
    if constexpr (Config::kAtoms) {
      return scale_atom(row, column);
    } else if constexpr (Config::Scaling::kTensor) {
      return slice_.group;
    } else if constexpr (Config::Scaling::kRow) {
      return Config::kColumnwise ? slice_.group * in_.columns + column : row_ + row;
    } else {
      constexpr int kBlock = Config::kBlock;
      const int64_t across = (columns_ + kBlock - 1) / kBlock;
      const int64_t block = block_of<kBlock>(groups_, slice_);
      if constexpr (Config::kSquare) return block * across + column / kBlock;
      if constexpr (Config::kColumnwise) return block * in_.columns + column;
      if (in_.token_pitch != 0) return column / kBlock * in_.token_pitch + place_ + row;
      return (row_ + row) * across + column / kBlock;
    }
  }

  __device__ __forceinline__ int64_t scale_atom(int32_t row, int32_t column) const {
    constexpr int32_t kBytes = Config::Scaling::kAtomBlock;
    const int32_t place = place_of(groups_, slice_, kAtomSpace) + row;
    const int64_t group = groups_.ragged() ? 0 : slice_.group;
    const int64_t along_rows = atoms_along_rows(groups_, kBytes), along_columns = atoms_along(columns_, kBytes);
    if constexpr (Config::kColumnwise) {
      const int64_t matrix = group * atoms_along(columns_, kAtomRows / kAtomBlocks) * along_rows * kAtomBytes;
      return matrix + atom_place(column, place / kBytes, along_rows);
    } else {
      const int64_t matrix = group * (atom_row_blocks(groups_) / groups_.groups) * along_columns * kAtomBytes;
      return matrix + atom_place(place, column / kBytes, along_columns);
    }
  }

  const StatisticsArguments& in_;
  const RowGroups& groups_;
  const Slice slice_;
  const int32_t columns_;
  const int32_t column_;  // the lane's first
  const int64_t row_;     // the warp's first, in the tensor
  const int32_t place_;   // the same where groups start at multiples
  float whole_ = 1.0f;       // scale of the tensor
  Values<Element> values_;
};

template <class Config>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ StatisticsArguments in) {
  __shared__ TileSlices slices;
  __shared__ Tally tallies[kWarps];
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  const int64_t across = (in.columns + kTileColumns - 1) / kTileColumns;
  const Space space{Config::kBlock > in.row_align ? Config::kBlock : int32_t(in.row_align),
                    groups.rows};
  const int64_t tiles = row_tiles(groups, space) * across;
  wait_for_previous_kernel();
  Tally tally;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    __syncthreads();  // the last tile's slices have been read
    tile_slices(groups, space, int32_t(i / across), slices);
    const Slice slice = slices[threadIdx.x / 32];
    if (slice.group == groups.groups) continue;
    TileReader<Config>(in, groups, slice, int32_t(i % across) * kTileColumns).count(tally);
  }
  let_next_kernel_start();
  tally = tally_of_block(tally, tallies);
  if (threadIdx.x == 0) static_cast<Tally*>(in.partials)[blockIdx.x] = tally;
}

// One block.
static __global__ void __launch_bounds__(kThreads)
    add_statistics_kernel(const __grid_constant__ StatisticsArguments in) {
  __shared__ Tally tallies[kWarps];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto* partials = static_cast<const Tally*>(in.partials);
  Tally tally;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < in.blocks; i += kThreads) tally.merge(partials[i]);
  tally = tally_of_block(tally, tallies);
  if (threadIdx.x != 0) return;
  in.output[0] = tally.amax;
  in.output[1] = float(tally.nonzero);
  in.output[2] = float(tally.underflow);
  in.output[3] = float(tally.saturation);
  in.output[4] = tally.total == 0.0 ? 0.0f : float(sqrt(tally.error / tally.total));
}

}  // namespace quantizing

template <class Config>
static Status launch_statistics(const StatisticsArguments& in, Stream& stream) {
  using namespace quantizing;
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  static_assert(sizeof(Tally) == 48, "what the workspace has room for");
  if (Status status = check_rows(in); !status.ok()) return status;
  if (in.blocks < 1 || in.blocks > 65535) return {kInvalid, "1 <= blocks <= 65535"};
  if (in.pitch % kPitch != 0) return {kInvalid, "pitch % 16 = 0"};
  if (!is_alignment(in.row_align)) {
    return {kInvalid, "row_align: a power of two from 16 to 128 rows"};
  }
  if (Config::kRule == Rule::nvfp4 && in.amax == nullptr) return {kInvalid, "nv: amax"};
  const Status status = launch_kernel("cudaLaunchKernelEx(statistics)", &statistics_kernel<Config>,
                                      Grid{dim3(unsigned(in.blocks)), kThreads}, stream, in);
  if (!status.ok()) return status;
  return launch_kernel("cudaLaunchKernelEx(add_statistics)", &add_statistics_kernel,
                       Grid{dim3(1), kThreads}, stream, in);
}

}  // namespace fusegen
