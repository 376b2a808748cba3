// Columnwise copies of 8 bits that lie as the tensor does, [rows, columns], for matrix instructions
// that read operands in either major: what their writing and their decoding has of its own.
//
// Their rows are as long as those of the rowwise copy, whatever `pitch` says, which is 0; groups have
// no places of their own there, so that `row_align` is of tiles and of scales alone. Rows past all
// groups are zeros. A lane has 4 neighbouring columns of a row, which it stores as they are: nothing
// meets in shared memory.
#pragma once

#include "fusegen/quantize/dequantize.cuh"
#include "fusegen/quantize/write.cuh"

namespace fusegen {

namespace quantizing {

// Without lines of columns in shared memory.
template <class Config>
struct Unstaged : Config {
  static constexpr int kLineBytes = 1;
};

}  // namespace quantizing

// A `QuantizeConfig` whose columnwise copy is such.
template <class Config>
struct Untransposed : quantizing::Unstaged<Config> {
  static_assert(Config::Format::kBits == 8 && !Config::kHadamard && !Config::kStochastic,
                "4 bits are read K-major only, and transforms run along transposed rows");
  // Places in atoms, of both orientations at once, take registers that four blocks would not have.
  static constexpr int kBlocksPerSm =
      Config::kAtoms && Config::kBlocksPerSm > 3 ? 3 : Config::kBlocksPerSm;
};

namespace quantizing {

template <class Config>
struct Shared<Untransposed<Config>> : Shared<Unstaged<Config>> {};

template <class Config>
class TileWriter<Untransposed<Config>> : public TileWriter<Unstaged<Config>> {
  using Base = TileWriter<Unstaged<Config>>;

 public:
  using Base::Base;

 protected:
  using Base::in_, Base::values_, Base::columns_, Base::column_, Base::slice, Base::first_row;

  // Only rows have places, and zeros are what rows past all groups hold anyway.
  __device__ bool tile_owns_places() const { return false; }
  __device__ void stage_zeros() {}
  __device__ void copy_columns() {}

  // `factor_of(c, pairs)` scales a column.
  template <class FactorOf>
  __device__ __forceinline__ void encode_columns(FactorOf factor_of) {
    const uint32_t none[kWarpRows / 2] = {};
    float factors[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) factors[c] = factor_of(c, none);
    store_as_rows([&](int r) {
      float scaled[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) scaled[c] = values_.at(r, c) * factors[c];
      uint32_t codes;
      encode_values<Config>(&codes, scaled, nullptr);
      return codes;
    });
  }

  // Codes that both copies have.
  __device__ __forceinline__ void stage_transposed(const uint32_t (&codes)[kWarpRows]) {
    store_as_rows([&](int r) { return codes[r]; });
  }

 private:
  static constexpr int kAtOnce = 2;  // fewer rows than of a rowwise copy: factors take registers

  // `word_of(r)` has the codes of row r. Columns past the last one are zeros, and fill the pitch.
  template <class WordOf>
  __device__ __forceinline__ void store_as_rows(WordOf word_of) {
    const uint32_t pitch = uint32_t(columns_ + kPitch - 1) / kPitch * kPitch;
    const int count = column_ < int(pitch) ? slice().rows() : 0;
    uint8_t* to = opaque(static_cast<uint8_t*>(in_.columnwise.data) +
                         first_row() * pitch + column_);
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kAtOnce) {
      uint32_t codes[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) codes[r] = here(word_of(first + r));
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (first + r < count) *reinterpret_cast<uint32_t*>(to) = codes[r];
        to = opaque(to + pitch);
      }
    }
  }
};

// The scale of a line's element, in a matrix; lines of a block share those of its columns.
template <class Config>
__device__ __forceinline__ int64_t column_scale(const DequantizeArguments& in, int64_t line,
                                                int64_t column) {
  if constexpr (Config::kAtoms) {
    return atom_place(column, line / Config::Scaling::kAtomBlock, in.scale_line);
  } else {
    return line / Config::kBlock * in.scale_line + column;
  }
}

// Grid: x tiles along a line, y tiles of lines, z matrices.
template <class Config>
__global__ void __launch_bounds__(kThreads)
    dequantize_untransposed_kernel(const __grid_constant__ DequantizeArguments in) {
  using Scaling = typename Config::Scaling;
  __shared__ LineGroup line_groups[kDecodeTile];
  const int64_t matrix = blockIdx.z, first_line = int64_t(blockIdx.y) * kDecodeTile;
  const int64_t first = int64_t(blockIdx.x) * kDecodeTile;
  const auto* codes = static_cast<const uint8_t*>(in.data) + matrix * in.lines * in.pitch;
  auto* output = static_cast<typename Config::Output*>(in.output) + matrix * in.lines * in.length;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const RowGroups groups{in.group_sizes, int32_t(in.lines), int32_t(in.groups)};
  if (groups.ragged()) {
    if (threadIdx.x < kDecodeTile) line_groups[threadIdx.x] = {-1, 0};
    __syncthreads();
    const Space space{int32_t(in.row_align), 0};
    if (threadIdx.x < 32) find_line_groups(groups, space, first_line, threadIdx.x, line_groups);
    __syncthreads();
  }
#pragma unroll
  for (int i = threadIdx.x; i < kDecodeTile * kDecodeTile / kOctet; i += kThreads) {
    const int tile_line = i / (kDecodeTile / kOctet), octet = i % (kDecodeTile / kOctet) * kOctet;
    const int64_t line = first_line + tile_line, at = first + octet;
    if (line >= in.lines || at >= in.length) continue;
    const LineGroup own = groups.ragged() ? line_groups[tile_line] : LineGroup{0, 0};
    if (own.group < 0) continue;
    float values[kOctet];
    decode_octet<typename Config::Format>(values, codes + line * in.pitch, at, 1.0f);
#pragma unroll
    for (int e = 0; e < kOctet; ++e) {
      const int64_t index = column_scale<Config>(in, line + own.shift, at + e);
      values[e] *= scale_at<Scaling>(in.scale, matrix * in.scale_matrix + index);
    }
    store_octet(output + line * in.length + at, values);
  }
}

}  // namespace quantizing

// Of a columnwise copy whose scales are of blocks. Groups of scales start at multiples of
// `row_align` lines: those of a block, or of an atom.
template <class Config>
static Status launch_dequantize_untransposed(const DequantizeArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  static_assert(Config::kScaled && Config::kBlocks && !Config::kTransposed && !Config::kByGroup);
  constexpr int kStart = Config::kAtoms ? kAtomRows : Config::kBlock;
  if (in.length % kRowAlignment != 0) return {kInvalid, "length: a multiple of 8"};
  if (in.pitch % kPitch != 0) return {kInvalid, "pitch % 16 = 0"};
  if (in.group_sizes != nullptr && in.row_align != kStart) {
    return {kInvalid, "row_align: lines of a block, or of an atom"};
  }
  if (in.matrices == 0 || in.lines == 0 || in.length == 0) return {};
  constexpr int64_t kTile = quantizing::kDecodeTile;
  const int64_t line_tiles = (in.lines + kTile - 1) / kTile;
  if (line_tiles > 65535 || in.matrices > 65535) return {kInvalid, "lines <= 65535 * 64"};
  const dim3 grid(unsigned((in.length + kTile - 1) / kTile), unsigned(line_tiles),
                  unsigned(in.matrices));
  return launch_kernel("cudaLaunchKernelEx(dequantize untransposed)",
                       &quantizing::dequantize_untransposed_kernel<Config>,
                       Grid{grid, quantizing::kThreads}, stream, in);
}

}  // namespace fusegen
