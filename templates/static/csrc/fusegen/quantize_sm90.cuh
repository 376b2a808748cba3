// Quantise kernels: one read of the input writes the rowwise and the transposed columnwise copy.
//
// A block of threads owns 128 rows of one group and 128 columns, held in registers (see
// quantize_tile.cuh); 4 blocks share an SM, so that while one waits the loads of others are in
// flight. Rowwise codes are stored from registers, a line per warp and row. Columnwise codes meet
// in shared memory: a thread has 16 rows of a column, 16 bytes, and the copy out writes 8 such
// pieces of a column as one line. Pieces are swizzled by their column so that neither side has
// bank conflicts. Results do not depend on timing: maxima are exact and sums have a fixed order.
#pragma once

#include "quantize_config.cuh"

namespace fusegen {

namespace quantizing {

template <class Config>
struct alignas(16) Shared {
  uint8_t stage[kTileColumns * Config::kLineBytes];
  uint2 column_amax[kWarps][32];  // packed, of 4 columns
  float sums[kWarps][kTileColumns];
  float scratch[kWarps * 4];
  RowTile tile;
};

// One tile. Members are the same in all threads but for the lane's own columns.
template <class Config>
class TileQuantizer {
  using Element = typename Config::Element;
  using Format = typename Config::Format;
  using Stored = typename Config::Stored;
  using Scale = typename Scaler<Config>::Scale;
  static constexpr int kBlock = Config::kBlock;
  static constexpr bool kBlocks = kBlock != 0;
  static constexpr int kLanes = kBlocks ? kBlock / kLaneColumns : 32;  // that share a row's scale

 public:
  __device__ TileQuantizer(const QuantizeArguments& in, const RowGroups& groups,
                           const RowTile& tile, int32_t first_column, Shared<Config>& shared)
      : in_(in),
        groups_(groups),
        tile_(tile),
        columns_(int32_t(in.columns)),
        first_column_(first_column),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        column_(first_column + lane_ * kLaneColumns),
        row_(input_row(groups, tile)),
        shared_(shared) {}

  __device__ void run() {
    values_.load(static_cast<const Element*>(in_.input) + row_ * in_.columns + first_column_,
                 columns_, past() ? 0 : tile_.rows(), columns_ - first_column_);
    let_next_kernel_start();
    if (in_.folded_amax != nullptr && !past()) {
      raise_by_block(in_.folded_amax + tile_.group, values_.amax(), shared_.scratch);
    }
    if (in_.row_sums != nullptr) sum_rows();
    if constexpr (Config::kSquare || Config::kScaling == Scaling::tensor) {
      const Scale scale = shared_scale();
      if (in_.rowwise.data != nullptr) {
        store_rows([&](int) { return scale.factor; });
      }
      if (in_.columnwise.data != nullptr) {
        Scale scales[kLaneColumns] = {scale, scale, scale, scale};
        stage_columns(scales);
      }
    } else {
      if (in_.rowwise.data != nullptr) quantize_rows();
      if (in_.columnwise.data != nullptr) quantize_columns();
    }
    if (in_.columnwise.data != nullptr) {
      __syncthreads();
      copy_columns();
    }
  }

 private:
  __device__ bool past() const { return tile_.group == groups_.groups; }
  __device__ bool in_columns() const { return column_ < columns_; }
  __device__ Space block_space() const {
    return {kBlock, blocks(groups_.rows, kBlock) * kBlock};
  }
  __device__ static int32_t blocks(int32_t extent, int size) {
    return int32_t((uint32_t(extent) + size - 1) / size);
  }

  // ---- sums of the tile's rows, in a fixed order

  __device__ void sum_rows() {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) sum += values_.at(r, c);
      shared_.sums[warp_][lane_ * kLaneColumns + c] = sum;
    }
    __syncthreads();
    const int column = first_column_ + threadIdx.x;
    if (threadIdx.x < kTileColumns && column < columns_) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.sums[w][threadIdx.x];
      in_.row_sums[int64_t(tile_.index) * columns_ + column] = sum;
    }
  }

  // ---- one scale for a group or a square block

  __device__ Scale shared_scale() {
    if constexpr (Config::kScaling == Scaling::tensor) {
      return tensor_scale();
    } else {
      const float* amax = in_.rowwise.amax != nullptr ? in_.rowwise.amax : in_.columnwise.amax;
      const Scaler<Config> scaler(in_, amax, tile_.group);
      const Scale scale = scaler(square_amax());
      store_square(scale.stored, scaler(0.0f).stored);
      return scale;
    }
  }

  __device__ Scale tensor_scale() {
    const int32_t group = past() ? groups_.groups - 1 : tile_.group;
    Scale scale;
    if (in_.scale != nullptr) {
      scale.factor = in_.scale[group];
      scale.stored = 1.0f / scale.factor;
    } else {
      const float* amax = in_.rowwise.amax != nullptr ? in_.rowwise.amax : in_.columnwise.amax;
      scale = Scaler<Config>(in_, nullptr, group)(amax[group]);
    }
    if (threadIdx.x == 0 && tile_.row == 0 && first_column_ == 0 && !past()) {
      if (in_.rowwise.scale != nullptr) static_cast<float*>(in_.rowwise.scale)[group] = scale.stored;
      if (in_.columnwise.scale != nullptr) {
        static_cast<float*>(in_.columnwise.scale)[group] = scale.stored;
      }
    }
    return scale;
  }

  // Warps beside each other share a block of 32 or 128 rows, runs of lanes its columns.
  __device__ float square_amax() {
    float amax = values_.amax();
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, distance));
    }
    constexpr int kSharing = kBlock / kWarpRows;
    if constexpr (kSharing > 1) {
      constexpr int kRuns = 32 / kLanes;
      if (lane_ % kLanes == 0) shared_.scratch[warp_ * kRuns + lane_ / kLanes] = amax;
      __syncthreads();
      const int first = warp_ / kSharing * kSharing;
#pragma unroll
      for (int w = 0; w < kSharing; ++w) {
        amax = fmaxf(amax, shared_.scratch[(first + w) * kRuns + lane_ / kLanes]);
      }
    }
    return amax;
  }

  __device__ void store_square(Stored stored, Stored of_zeros) {
    if (lane_ % kLanes != 0 || !in_columns() || warp_ * kWarpRows % kBlock != 0) return;
    const int64_t across = blocks(columns_, kBlock);
    const int owned = int(owned_places(groups_, tile_, block_space()) / kBlock);
    const int64_t at = block_of(groups_, tile_, kBlock) * across + column_ / kBlock;
    const auto store = [&](int block, Stored value) {
      if (in_.rowwise.scale != nullptr) {
        static_cast<Stored*>(in_.rowwise.scale)[at + block * across] = value;
      }
      if (in_.columnwise.scale != nullptr) {
        static_cast<Stored*>(in_.columnwise.scale)[at + block * across] = value;
      }
    };
    const int block = warp_ * kWarpRows / kBlock;
    if (block < owned) store(block, stored);
    if (warp_ != 0) return;
    for (int extra = kTileRows / kBlock; extra < owned; ++extra) store(extra, of_zeros);
  }

  // ---- rowwise

  __device__ void quantize_rows() {
    const Scaler<Config> scaler(in_, in_.rowwise.amax, tile_.group);
    if constexpr (Config::kScaling == Scaling::row) {
      const int row = warp_ * kWarpRows + lane_ % kWarpRows;
      const bool exists = row < tile_.rows();
      const Scale scale = scaler(exists && !past() ? in_.rowwise.amax[row_ + row] : 0.0f);
      if (exists && lane_ < kWarpRows && first_column_ == 0) {
        static_cast<float*>(in_.rowwise.scale)[row_ + row] = scale.stored;
      }
      store_rows([&](int r) { return __shfl_sync(kAll, scale.factor, r); });
    } else {
      using Amaxes = RowAmaxes<Element, kLanes>;
      constexpr int kSlots = Amaxes::kCopies > 1 ? 1 : 2 * Amaxes::kPairs;
      const Amaxes amaxes(values_);
      float factors[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int odd = kSlots == 1 ? lane_ % 2 : slot % 2;
        const uint32_t pair = amaxes.pairs[slot / 2];
        const Scale scale = scaler(odd ? widen_high<Element>(pair) : widen_low<Element>(pair));
        factors[slot] = scale.factor;
        const int row = 2 * (Amaxes::first_pair(lane_) + slot / 2) + odd;
        if (kSlots > 1 || lane_ % 4 < 2) store_row_scale(warp_ * kWarpRows + row, scale.stored);
      }
      store_rows([&](int r) {
        if constexpr (kSlots == 1) return __shfl_sync(kAll, factors[0], r / 2 * 4 + r % 2);
        constexpr int kRows = kSlots;  // of one lane
        return __shfl_sync(kAll, factors[r % kRows], r / kRows, kLanes);
      });
      if (kBlock == 128 && in_.token_pitch != 0) pad_token_scales();
    }
  }

  __device__ Space token_space() const { return {int32_t(in_.row_align), in_.token_pitch}; }

  __device__ void store_row_scale(int row, Stored stored) {
    if (!in_columns()) return;
    auto* scales = static_cast<Stored*>(in_.rowwise.scale);
    const int64_t block = column_ / kBlock;
    if (kBlock == 128 && in_.token_pitch != 0) {
      if (row >= owned_places(groups_, tile_, token_space())) return;
      const bool exists = row < tile_.rows() && !past();
      scales[block * in_.token_pitch + place_of(groups_, tile_, token_space()) + row] =
          exists ? stored : Stored(1);
    } else if (row < tile_.rows()) {
      scales[(row_ + row) * blocks(columns_, kBlock) + block] = stored;
    }
  }

  __device__ void pad_token_scales() {
    const int owned = owned_places(groups_, tile_, token_space());
    auto* scales = static_cast<Stored*>(in_.rowwise.scale) +
                   first_column_ / kTileColumns * in_.token_pitch +
                   place_of(groups_, tile_, token_space());
    for (int row = kTileRows + threadIdx.x; row < owned; row += kThreads) scales[row] = Stored(1);
  }

  // Columns past the last one are zeros, and fill the pitch.
  template <class FactorOf>
  __device__ void store_rows(FactorOf factor_of) {
    const int64_t end = blocks(columns_ * Format::kBits, 128) * 128 / Format::kBits;
    const int count = column_ < end ? tile_.rows() - warp_ * kWarpRows : 0;
    uint8_t* to = static_cast<uint8_t*>(in_.rowwise.data) +
                  (row_ + warp_ * kWarpRows) * in_.rowwise.pitch + column_ * Format::kBits / 8;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const uint32_t codes = encode_row(r, factor_of(r));
      if (r >= count) continue;
      if constexpr (Format::kBits == 8) {
        *reinterpret_cast<uint32_t*>(to + r * in_.rowwise.pitch) = codes;
      } else {
        *reinterpret_cast<uint16_t*>(to + r * in_.rowwise.pitch) = uint16_t(codes);
      }
    }
  }

  __device__ __forceinline__ uint32_t encode_row(int r, float factor) {
    float scaled[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) scaled[c] = values_.at(r, c) * factor;
    uint32_t random = 0;
    if constexpr (Config::kStochastic) {
      const int64_t row = row_ + warp_ * kWarpRows + r;
      random = draw(in_.rng_state, row * blocks(columns_, 16) + column_ / 16, 0).words[lane_ % 4];
    }
    uint32_t codes;
    encode_values<Config>(&codes, scaled, &random);
    return codes;
  }

  // ---- columnwise

  __device__ void quantize_columns() {
    const Scaler<Config> scaler(in_, in_.columnwise.amax, tile_.group);
    Scale scales[kLaneColumns];
    if constexpr (Config::kScaling == Scaling::row) {
      scale_whole_columns(scales, scaler);
      stage_columns(scales);
    } else {
      scale_column_blocks(scales, scaler);
      stage_columns(scales, &scaler);
      store_column_scales(scales, scaler(0.0f).stored);
    }
  }

  __device__ void scale_whole_columns(Scale (&scales)[kLaneColumns],
                                      const Scaler<Config>& scaler) {
    float4 amax = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int64_t at = tile_.group * columns_ + column_;
    const bool reads = in_columns() && !past();
    if (reads) amax = *reinterpret_cast<const float4*>(in_.columnwise.amax + at);
    scales[0] = scaler(amax.x);
    scales[1] = scaler(amax.y);
    scales[2] = scaler(amax.z);
    scales[3] = scaler(amax.w);
    if (reads && tile_.row == 0 && warp_ == 0) {
      *reinterpret_cast<float4*>(static_cast<float*>(in_.columnwise.scale) + at) = make_float4(
          scales[0].stored, scales[1].stored, scales[2].stored, scales[3].stored);
    }
  }

  __device__ void scale_column_blocks(Scale (&scales)[kLaneColumns],
                                      const Scaler<Config>& scaler) {
    if constexpr (Config::kHadamard) return;  // not known before the transform
    uint32_t low = values_.column_pair_amax(0), high = values_.column_pair_amax(1);
    constexpr int kSharing = kBlock / kWarpRows;
    if constexpr (kSharing > 1) {
      shared_.column_amax[warp_][lane_] = make_uint2(low, high);
      __syncthreads();
      const int first = warp_ / kSharing * kSharing;
#pragma unroll
      for (int w = 0; w < kSharing; ++w) {
        const uint2 other = shared_.column_amax[first + w][lane_];
        low = maximum<Element>(low, other.x);
        high = maximum<Element>(high, other.y);
      }
    }
    scales[0] = scaler(widen_low<Element>(low));
    scales[1] = scaler(widen_high<Element>(low));
    scales[2] = scaler(widen_low<Element>(high));
    scales[3] = scaler(widen_high<Element>(high));
  }

  // Codes of 16 rows of each column, into shared memory. After a transform the scales follow from
  // what it gave.
  __device__ void stage_columns(Scale (&scales)[kLaneColumns],
                                const Scaler<Config>* scaler = nullptr) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      float run[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] = values_.at(r, c);
      if constexpr (Config::kHadamard) {
        hadamard(run);
        float amax = 0.0f;
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) amax = fmaxf(amax, fabsf(run[r]));
        scales[c] = (*scaler)(amax);
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] *= scales[c].factor;
      uint32_t words[Config::kRunWords];
      PhiloxWords random{};
      if constexpr (Config::kStochastic) {
        const int64_t block = block_of(groups_, tile_, kWarpRows) + warp_;
        random = draw(in_.rng_state, block * columns_ + column_ + c, 1);
      }
      encode_values<Config>(words, run, random.words);
      stage(words, c);
    }
  }

  // Where piece `piece` of 16 bytes of a column of the tile stands.
  __device__ static int staged(int column, int piece) {
    const int swizzled = piece ^ (column / kLaneColumns % Config::kPieces);
    return column * Config::kLineBytes + swizzled * 16;
  }

  __device__ __forceinline__ void stage(const uint32_t (&words)[Config::kRunWords], int c) {
    const int column = lane_ * kLaneColumns + c;
    if constexpr (Format::kBits == 8) {
      *reinterpret_cast<uint4*>(shared_.stage + staged(column, warp_)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(shared_.stage + staged(column, warp_ / 2) + warp_ % 2 * 8) =
          make_uint2(words[0], words[1]);
    }
  }

  __device__ void store_column_scales(const Scale (&scales)[kLaneColumns], Stored of_zeros) {
    if (!in_columns() || warp_ * kWarpRows % kBlock != 0) return;
    const int owned = int(owned_places(groups_, tile_, block_space()) / kBlock);
    Stored* to = static_cast<Stored*>(in_.columnwise.scale) +
                 block_of(groups_, tile_, kBlock) * columns_ + column_;
    const int block = warp_ * kWarpRows / kBlock;
    if (block < owned) {
      store_four(to + block * columns_, scales[0].stored, scales[1].stored, scales[2].stored,
                 scales[3].stored);
    }
    if (warp_ != 0) return;
    for (int extra = kTileRows / kBlock; extra < owned; ++extra) {
      store_four(to + extra * columns_, of_zeros, of_zeros, of_zeros, of_zeros);
    }
  }

  __device__ static void store_four(Stored* to, Stored a, Stored b, Stored c, Stored d) {
    if constexpr (sizeof(Stored) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
    } else {
      *reinterpret_cast<uchar4*>(to) = make_uchar4(a, b, c, d);
    }
  }

  // The tile's lines, then zeros over what it owns beyond its 128 rows.
  __device__ void copy_columns() {
    constexpr int kPieceRows = kTileRows / Config::kPieces;
    const QuantizedCopy& copy = in_.columnwise;
    const Space space{int32_t(in_.row_align), copy.pitch * 8 / Format::kBits};
    const int owned = owned_places(groups_, tile_, space);
    const int64_t matrix = groups_.ragged() ? 0 : tile_.group * columns_ * copy.pitch;
    uint8_t* to = static_cast<uint8_t*>(copy.data) + matrix + first_column_ * copy.pitch +
                  place_of(groups_, tile_, space) * Format::kBits / 8;
    const int columns = min(kTileColumns, columns_ - first_column_);
    const int piece = threadIdx.x % Config::kPieces;
    constexpr int kStep = kThreads / Config::kPieces;
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      const int column = threadIdx.x / Config::kPieces + i * kStep;
      if (column >= columns || piece * kPieceRows >= owned) continue;
      *reinterpret_cast<uint4*>(to + column * copy.pitch + piece * 16) =
          *reinterpret_cast<const uint4*>(shared_.stage + staged(column, piece));
    }
    const int extra = max(0, (owned - kTileRows) / kPieceRows);
    for (int i = threadIdx.x; i < extra * columns; i += kThreads) {
      *reinterpret_cast<uint4*>(to + i / extra * copy.pitch + (Config::kPieces + i % extra) * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }

  const QuantizeArguments& in_;
  const RowGroups& groups_;
  const RowTile tile_;
  const int32_t columns_, first_column_;
  const int lane_, warp_;
  const int32_t column_;  // the lane's first
  const int64_t row_;     // of the input, the tile's first
  Shared<Config>& shared_;
  Values<Element> values_;
};

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kBlocksPerSm)
    quantize_kernel(const __grid_constant__ QuantizeArguments in) {
  __shared__ Shared<Config> shared;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const RowTile tile = block_tile(groups, &shared.tile);
  if (tile.group < 0) return;
  TileQuantizer<Config>(in, groups, tile, blockIdx.y * kTileColumns, shared).run();
}

// The requirement that a copy breaks, or nullptr.
template <class Config>
const char* broken_requirement(const QuantizeArguments& in) {
  const bool ragged = in.split_sizes != nullptr;
  const bool rowwise = in.rowwise.data != nullptr, columnwise = in.columnwise.data != nullptr;
  const bool row = Config::kScaling == Scaling::row;
  if (in.row_align < kTileRows / Config::kPieces || in.row_align % (kTileRows / Config::kPieces)) {
    return "row_align: whole pieces of 16 bytes";
  }
  if (in.rowwise.pitch % 16 != 0 || in.columnwise.pitch % 16 != 0) return "pitch % 16 = 0";
  if (row && rowwise && in.rowwise.amax == nullptr) return "row: rowwise.amax";
  if (row && columnwise && in.columnwise.amax == nullptr) return "row: columnwise.amax";
  if (Config::kScaling == Scaling::tensor && in.scale == nullptr && in.rowwise.amax == nullptr &&
      in.columnwise.amax == nullptr) {
    return "tensor: a scale or an amax";
  }
  if (Config::kStochastic && in.rng_state == nullptr) return "stochastic: rng_state";
  if (in.token_pitch != 0 && Config::kScaling != Scaling::block_1x128) return "token_pitch = 0";
  if (in.token_pitch != 0 && !ragged && in.groups != 1) return "token_pitch = 0 for matrices";
  return nullptr;
}

}  // namespace quantizing

// At least one copy, a fold or row sums; see quantize.h for what each needs.
template <class Config>
static Status launch_quantize(const QuantizeArguments& in, cudaStream_t stream) {
  using namespace quantizing;
  if (Status status = check_rows(in); !status.ok()) return status;
  if (const char* broken = broken_requirement<Config>(in)) {
    return {static_cast<int>(cudaErrorInvalidValue), broken};
  }
  return launch_tiles("cudaLaunchKernelEx(quantize)", &quantize_kernel<Config>, in, stream);
}

}  // namespace fusegen
