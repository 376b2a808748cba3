// Codes back to 16 bits: for recipes that an architecture has no matrix instruction for, and for
// what a copy stands for.
//
// Every element is code * scale in fp32, rounded once; with a scale that is a power of two, or E4M3
// times an E2M1 code, the product is exact in bf16. `Unscaled` leaves scales to others: codes as
// they are. Output as stored, or transposed: columnwise copies [columns, rows] become the row-major
// operand [rows, columns] of a 16-bit GEMM. Tiles of 64 x 64 are transposed in shared memory.
#pragma once

#include "fusegen/quantize/quantize.h"
#include "fusegen/quantize/config.cuh"
#include "fusegen/quantize/tile.cuh"

namespace fusegen {

template <class Format_, class Scaling_, bool transposed, class Output_ = __nv_bfloat16,
          bool by_group = false, bool atoms = false>
struct DequantizeConfig {
  using Format = Format_;
  using Scaling = Scaling_;
  using Output = Output_;
  static constexpr bool kScaled = !std::is_same_v<Scaling, Unscaled>;
  static constexpr bool kBlocks = Scaling::kBlock > 0;
  // Elements of a line that share a scale; any number where all of them do, with a stride of 0.
  static constexpr int kBlock = kBlocks ? Scaling::kBlock : 8;
  static constexpr bool kTransposed = transposed;
  static constexpr bool kByGroup = by_group;  // square blocks of lines begin with their groups
  static constexpr bool kAtoms = atoms;  // scales lie as scale_atoms.cuh says
  static_assert(!by_group || Scaling::kSquare);
  static_assert(!atoms || (kScaled && !by_group), "scales of rows, wherever their groups begin");
};

namespace quantizing {

inline constexpr int kDecodeTile = 64;  // lines of a tile, and elements of each
inline constexpr int kOctet = 8;  // elements that a thread decodes at once: 16 bytes of output

struct TransposeShared {
  float values[kDecodeTile][kDecodeTile + 1];
};

template <class Scaling>
__device__ __forceinline__ float scale_at(const void* scales, int64_t index) {
  if constexpr (std::is_same_v<typename Scaling::Stored, float>) {
    return static_cast<const float*>(scales)[index];
  } else {
    const uint32_t code = static_cast<const uint8_t*>(scales)[index];
    return Scaling::kExponents ? e8m0_value(code) : decode<E4M3>(code);
  }
}

// Eight codes, the first at element `at` of a line.
template <class Format>
__device__ __forceinline__ void decode_octet(float (&values)[kOctet], const uint8_t* line,
                                             int64_t at, float scale) {
  const auto* from = reinterpret_cast<const uint32_t*>(line + at * Format::kBits / 8);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < Format::kBits / 4; ++w) words[w] = from[w];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    constexpr int kPerWord = 32 / Format::kBits;
    const uint32_t code = words[i / kPerWord] >> (i % kPerWord * Format::kBits);
    values[i] = decode<Format>(code & ((1u << Format::kBits) - 1)) * scale;
  }
}

template <class Output>
__device__ __forceinline__ void store_octet(Output* to, const float (&values)[kOctet]) {
  struct alignas(16) Octet {
    Output elements[kOctet];
  } octet;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) narrow(values[i], &octet.elements[i]);
  *reinterpret_cast<Octet*>(to) = octet;
}

// An octet of a line as a column of the transposed tile.
__device__ __forceinline__ void transpose_octet(TransposeShared& shared, int line, int octet,
                                                const float (&values)[kOctet]) {
#pragma unroll
  for (int e = 0; e < kOctet; ++e) shared.values[octet + e][line] = values[e];
}

// The transposed tile to `rows` rows and `columns` columns of a row-major matrix.
template <class Output>
__device__ __forceinline__ void store_transposed(const TransposeShared& shared, Output* to,
                                                 int64_t pitch, int64_t rows, int64_t columns) {
#pragma unroll
  for (int i = threadIdx.x; i < kDecodeTile * kDecodeTile / kOctet; i += kThreads) {
    const int row = i / (kDecodeTile / kOctet), octet = i % (kDecodeTile / kOctet) * kOctet;
    if (row >= rows || octet >= columns) continue;
    float values[kOctet];
#pragma unroll
    for (int e = 0; e < kOctet; ++e) values[e] = shared.values[row][octet + e];
    store_octet(to + row * pitch + octet, values);
  }
}

// Where a line stands: its group, negative past all groups, and how far from the line its scales.
struct LineGroup {
  int32_t group, shift;
};

// Those of a tile's lines that have a group, by one warp.
__device__ inline void find_line_groups(const RowGroups& groups, Space space, int64_t first_line,
                                        int lane, LineGroup (&found)[kDecodeTile]) {
  const auto mark = [&](int32_t group, int32_t begin, int32_t end) {
    if (group == groups.groups) return;
    const LineGroup own{group, space.align == 0 ? 0 : start_of(begin, group, space) - begin};
    const int64_t last = min(end - first_line, int64_t(kDecodeTile));
    for (int64_t line = max(begin - first_line, int64_t(0)); line < last; ++line) found[line] = own;
  };
  walk_groups(groups, lane, mark,
              [&](int32_t, int32_t begin) { return begin >= first_line + kDecodeTile; });
}

// The line of scales that is a line's.
template <class Config>
__device__ __forceinline__ int64_t scale_line(const DequantizeArguments& in, int64_t line,
                                              const LineGroup& own) {
  if constexpr (Config::kByGroup) return (line + own.shift) / in.lines_per_scale;
  return line / in.lines_per_scale + own.shift;
}

// Index of the scale of a line's element, of a matrix.
template <class Config>
__device__ __forceinline__ int64_t scale_index(const DequantizeArguments& in, int64_t line, int64_t at,
                                               const LineGroup& own) {
  if constexpr (Config::kAtoms) {
    return atom_place(line + own.shift, at / Config::Scaling::kAtomBlock, in.scale_line);
  } else {
    return own.group * in.scale_group + scale_line<Config>(in, line, own) * in.scale_line +
           at / Config::kBlock * in.scale_block;
  }
}

// An octet of a line from element `at` on, decoded.
template <class Config>
__device__ __forceinline__ void decode_line(float (&values)[kOctet], const DequantizeArguments& in,
                                            int64_t matrix, int64_t line, int64_t at,
                                            LineGroup own) {
  const auto* codes = static_cast<const uint8_t*>(in.data) + (matrix * in.lines + line) * in.pitch;
  float scale = 1.0f, whole = 1.0f;
  if constexpr (Config::kScaled) {
    scale = scale_at<typename Config::Scaling>(
        in.scale, matrix * in.scale_matrix + scale_index<Config>(in, line, at, own));
    whole = in.amax == nullptr ? 1.0f : 1.0f / nvfp4_tensor_scale(in.amax[matrix + own.group]);
  }
  decode_octet<typename Config::Format>(values, codes, at, scale);
#pragma unroll
  for (int e = 0; e < kOctet; ++e) values[e] *= whole;
}

// Grid: x tiles along a line, y tiles of lines, z matrices.
template <class Config>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeArguments in) {
  using Output = typename Config::Output;
  __shared__ TransposeShared shared;
  const int64_t matrix = blockIdx.z;
  const int64_t first_line = int64_t(blockIdx.y) * kDecodeTile;
  const int64_t first = int64_t(blockIdx.x) * kDecodeTile;
  auto* output = static_cast<Output*>(in.output) + matrix * in.lines * in.length;
  __shared__ LineGroup line_groups[kDecodeTile];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const RowGroups groups{Config::kScaled ? in.group_sizes : nullptr, int32_t(in.lines),
                         int32_t(in.groups)};
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
    decode_line<Config>(values, in, matrix, line, at, own);
    if constexpr (Config::kTransposed) {
      transpose_octet(shared, tile_line, octet, values);
    } else {
      store_octet(output + line * in.length + at, values);
    }
  }
  if constexpr (Config::kTransposed) {
    __syncthreads();
    store_transposed(shared, output + first * in.lines + first_line, in.lines, in.length - first,
                     in.lines - first_line);
  }
}

inline constexpr Space kGroupTiles{kTileRows, 0};  // whose tiles are of one group each

// Rows of a group that are decoded together: of a block, but no more than every alignment of groups
// leaves room for.
template <class Config>
inline constexpr int kDecodedRows = Config::kBlock < 32 ? Config::kBlock : 32;

// Index of the first scale that a tile of a columnwise copy reads.
template <class Config>
__device__ __forceinline__ int64_t first_scale_of(const DequantizeGroupsArguments& in,
                                                  const RowGroups& groups, const Slice& tile,
                                                  int64_t first_column) {
  using Scaling = typename Config::Scaling;
  if constexpr (Config::kAtoms) return 0;
  if constexpr (Scaling::kTensor) return tile.group;
  if constexpr (Scaling::kRow) return tile.group * in.columns + first_column;
  if constexpr (Scaling::kSquare) {
    static_assert(kDecodeTile % Config::kBlock == 0 || Config::kBlock % kDecodeTile == 0);
    const int64_t across = (in.columns + Config::kBlock - 1) / Config::kBlock;
    return block_of<Config::kBlock>(groups, tile) * across + first_column / Config::kBlock;
  } else {
    return block_of<Config::kBlock>(groups, tile) * in.columns + first_column;
  }
}

// Of an element of the tile, counted from that.
template <class Config>
__device__ __forceinline__ int64_t scale_offset(const DequantizeGroupsArguments& in, int32_t row,
                                                int column) {
  using Scaling = typename Config::Scaling;
  if constexpr (Scaling::kTensor) return 0;
  if constexpr (Scaling::kRow) return column;
  if constexpr (Scaling::kSquare) {
    const int64_t across = (in.columns + Config::kBlock - 1) / Config::kBlock;
    return row / Config::kBlock * across + column / Config::kBlock;
  }
  return row / Config::kBlock * in.columns + column;
}

// Of one in atoms, from the first one on.
template <class Scaling>
__device__ __forceinline__ int64_t scale_atom(const DequantizeGroupsArguments& in, int64_t column,
                                              int32_t place) {
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  return atom_place(column, place / Scaling::kAtomBlock, atoms_along_rows(groups, Scaling::kAtomBlock));
}

// Rows `first` to `first` + 64 of a tile, transposed: zeros from row `rows` on. `codes` and
// `first_scale` are the first column's.
template <class Config>
__device__ __forceinline__ void decode_rows(TransposeShared& shared,
                                            const DequantizeGroupsArguments& in,
                                            const uint8_t* codes, int64_t first_scale,
                                            int64_t first_column, int32_t place, int32_t first,
                                            int32_t rows) {
#pragma unroll
  for (int i = threadIdx.x; i < kDecodeTile * kDecodeTile / kOctet; i += kThreads) {
    const int column = i / (kDecodeTile / kOctet), octet = i % (kDecodeTile / kOctet) * kOctet;
    const int32_t row = first + octet;
    if (first_column + column >= in.columns) continue;
    float values[kOctet] = {};
    if (row < rows) {
      float scale = 1.0f;
      if constexpr (Config::kAtoms) {
        scale = scale_at<typename Config::Scaling>(
            in.scale, scale_atom<typename Config::Scaling>(in, first_column + column, place + row));
      } else if constexpr (Config::kScaled) {
        scale = scale_at<typename Config::Scaling>(
            in.scale, first_scale + scale_offset<Config>(in, row, column));
      }
      decode_octet<typename Config::Format>(values, codes + column * in.pitch, place + row, scale);
    }
    transpose_octet(shared, column, octet, values);
  }
}

// A block of threads owns a tile of 128 rows of one group, the padding after a group's last row
// included, and 64 columns. Places past all groups are left alone: no GEMM reads them.
template <class Config>
__global__ void __launch_bounds__(kThreads)
    dequantize_groups_kernel(const __grid_constant__ DequantizeGroupsArguments in) {
  using Output = typename Config::Output;
  __shared__ TransposeShared shared;
  __shared__ TileSlices slices;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  if (row_tile() >= row_tiles(groups, kGroupTiles)) return;
  tile_slices(groups, kGroupTiles, row_tile(), slices);
  const Slice tile = slices[0];
  let_next_kernel_start();
  if (tile.group == groups.groups) return;
  const Space space{int32_t(in.row_align), 0};
  const int32_t place = place_of(groups, tile, space);
  const int32_t left = owned_places(groups, tile, space), owned = least(left, kTileRows);
  if (in.padded_sizes != nullptr && blockIdx.y == 0 && tile.row == 0 && threadIdx.x == 0) {
    in.padded_sizes[tile.group] = left;
  }
  // All of them: a transform leaves no zeros in the rest of a group's last block.
  constexpr int kTogether = kDecodedRows<Config>;
  const int32_t rows = (tile.rows(kTileRows) + kTogether - 1) / kTogether * kTogether;
  const int64_t first_column = int64_t(blockIdx.y) * kDecodeTile;
  const auto* codes = static_cast<const uint8_t*>(in.data) + first_column * in.pitch;
  int64_t first_scale = 0;
  if constexpr (Config::kScaled) first_scale = first_scale_of<Config>(in, groups, tile, first_column);
  auto* output = static_cast<Output*>(in.output) + place * in.columns + first_column;
#pragma unroll 1
  for (int32_t first = 0; first < owned; first += kDecodeTile) {
    decode_rows<Config>(shared, in, codes, first_scale, first_column, place, first, rows);
    __syncthreads();
    store_transposed(shared, output + first * in.columns, in.columns, owned - first,
                     in.columns - first_column);
    __syncthreads();
  }
}

}  // namespace quantizing

// Lines are a multiple of 8 elements; where transposed there are a multiple of 8 of them, too.
template <class Config>
static Status launch_dequantize(const DequantizeArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.length % kRowAlignment != 0) return {kInvalid, "length: a multiple of 8"};
  if (Config::kTransposed && in.lines % kRowAlignment != 0) {
    return {kInvalid, "lines: a multiple of 8"};
  }
  if (in.pitch % kPitch != 0) return {kInvalid, "pitch % 16 = 0"};
  if (Config::kAtoms && in.group_sizes != nullptr && in.row_align != kAtomRows) {
    return {kInvalid, "row_align = 128 where scales lie in atoms"};
  }
  if (in.lines_per_scale < 1) return {kInvalid, "lines_per_scale >= 1"};
  if (in.matrices == 0 || in.lines == 0 || in.length == 0) return {};
  constexpr int64_t kTile = quantizing::kDecodeTile;
  const int64_t line_tiles = (in.lines + kTile - 1) / kTile;
  if (line_tiles > 65535 || in.matrices > 65535) return {kInvalid, "lines <= 65535 * 64"};
  const dim3 grid(unsigned((in.length + kTile - 1) / kTile), unsigned(line_tiles),
                  unsigned(in.matrices));
  return launch_kernel("cudaLaunchKernelEx(dequantize)", &quantizing::dequantize_kernel<Config>,
                       Grid{grid, quantizing::kThreads}, stream, in);
}

template <class Config>
static Status launch_dequantize_groups(const DequantizeGroupsArguments& in, Stream& stream) {
  static_assert(Config::kTransposed, "a columnwise copy is transposed");
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (Status status = quantizing::check_rows(in); !status.ok()) return status;
  if (!quantizing::is_alignment(in.row_align) || in.row_align < quantizing::kDecodedRows<Config>) {
    return {kInvalid, "row_align: a power of two from 32 rows, or one block's, to 128"};
  }
  if (Config::kAtoms && in.row_align != kAtomRows) {
    return {kInvalid, "row_align = 128 where scales lie in atoms"};
  }
  if (in.pitch % kPitch != 0) return {kInvalid, "pitch % 16 = 0"};
  return quantizing::launch_tiles<quantizing::kDecodeTile>(
      "cudaLaunchKernelEx(dequantize_groups)", &quantizing::dequantize_groups_kernel<Config>, in,
      quantizing::kGroupTiles, stream);
}

}  // namespace fusegen
