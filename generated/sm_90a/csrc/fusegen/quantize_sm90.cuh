// Quantise kernels: one read of the input writes the rowwise and the transposed columnwise copy.
//
// A block of threads owns 128 rows of one group and 128 columns, held in registers (see
// quantize_tile.cuh); 4 blocks share an SM, so that while one waits the loads of others are in
// flight. Rowwise codes are stored from registers, a line per warp and row. Columnwise codes meet
// in shared memory: a thread has 16 rows of a column, 16 bytes, and the copy out writes 8 such
// pieces of a column as one line. Pieces are swizzled by their column so that neither side has
// bank conflicts. Results do not depend on timing: maxima are exact and sums have a fixed order.
#pragma once

#include "quantize_write.cuh"

namespace fusegen {

namespace quantizing {

// One tile: its scales, and what they are multiplied into.
template <class Config>
class TileQuantizer : TileWriter<Config> {
  using Base = TileWriter<Config>;
  using Base::in_, Base::groups_, Base::tile_, Base::shared_, Base::values_, Base::lane_,
      Base::warp_, Base::columns_, Base::first_column_, Base::column_, Base::row_, Base::blocks,
      Base::past, Base::in_columns, Base::has_rows, Base::encode_row,
      Base::store_rows;
  using Element = typename Config::Element;
  using Format = typename Config::Format;
  using Stored = typename Config::Stored;
  using Scale = typename Scaler<Config>::Scale;
  static constexpr int kBlock = Config::kBlock;
  static constexpr int kLanes = kBlock ? kBlock / kLaneColumns : 32;  // that share a row's scale
  static constexpr Stored kPadding = Config::kRule == Rule::ratio ? 1 : 0;  // scale of no rows

 public:
  using Base::Base;

  template <class Source>
  __device__ void run(const Source& source) {
    const int first = warp_ * kWarpRows;
    source.load(values_, in_, row_ + first, column_, past() ? 0 : tile_.rows() - first);
    let_next_kernel_start();
    if (in_.folded_amax != nullptr && !past()) {
      raise_by_block(in_.folded_amax + tile_.group, values_.amax(), shared_.scratch);
    }
    if (in_.row_sums != nullptr) this->sum_rows();
    if constexpr (Config::kSquare || Config::kScaling == Scaling::tensor) {
      const Scale scale = shared_scale();
      if (has_rows()) {
        quantize_with(scale);
      } else if (in_.columnwise.data != nullptr) {
        this->stage_zeros();
      }
    } else {
      // Usually both copies have one amax.
      const Scaler<Config> rows(in_, in_.rowwise.amax, tile_.group);
      const Scaler<Config> columns = in_.columnwise.amax == in_.rowwise.amax
                                         ? rows
                                         : Scaler<Config>(in_, in_.columnwise.amax, tile_.group);
      if (in_.rowwise.data != nullptr) {
        if (has_rows()) quantize_rows(rows);
        if (token_major()) pad_token_scales();
      }
      if (in_.columnwise.data != nullptr) quantize_columns(columns);
    }
    if (in_.columnwise.data != nullptr) {
      __syncthreads();
      this->copy_columns();
    }
  }

 private:
  // ---- one scale for a group or a square block

  // Codes of 8 bits are the same in both copies: 4 x 4 of them are turned over in registers.
  __device__ void quantize_with(const Scale& scale) {
    if constexpr (Format::kBits == 8) {
      uint32_t codes[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) codes[r] = encode_row(r, scale.factor);
      if (in_.rowwise.data != nullptr) store_rows([&](int r) { return codes[r]; });
      if (in_.columnwise.data != nullptr) this->stage_turned(codes);
    } else {
      const Scale scales[kLaneColumns] = {scale, scale, scale, scale};
      if (in_.rowwise.data != nullptr) {
        store_rows([&](int r) { return encode_row(r, scale.factor); });
      }
      if (in_.columnwise.data != nullptr) stage_columns(scales);
    }
  }

  __device__ Scale shared_scale() {
    if constexpr (Config::kScaling == Scaling::tensor) {
      return tensor_scale();
    } else {
      const float* amax = in_.rowwise.amax != nullptr ? in_.rowwise.amax : in_.columnwise.amax;
      const Scaler<Config> scaler(in_, amax, tile_.group);
      const Scale scale = scaler(square_amax());
      store_square(scale.stored);
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
      for (void* scales : {in_.rowwise.scale, in_.columnwise.scale}) {
        if (scales != nullptr) static_cast<float*>(scales)[group] = scale.stored;
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

  __device__ bool holds_rows(int row) const { return !past() && row < tile_.rows(); }
  // Blocks of rows that the tile owns; none or less past the last one.
  __device__ int owned_blocks() const {
    const Space space{kBlock, blocks(groups_.rows, kBlock) * kBlock};
    return owned_places(groups_, tile_, space) / kBlock;
  }

  __device__ void store_square(Stored stored) {
    if (lane_ % kLanes != 0 || !in_columns() || warp_ * kWarpRows % kBlock != 0) return;
    const int64_t across = blocks(columns_, kBlock);
    const int owned = owned_blocks();
    const int64_t at = block_of<kBlock>(groups_, tile_) * across + column_ / kBlock;
    const auto store = [&](int block, Stored value) {
      for (void* scales : {in_.rowwise.scale, in_.columnwise.scale}) {
        if (scales != nullptr) static_cast<Stored*>(scales)[at + block * across] = value;
      }
    };
    const int block = warp_ * kWarpRows / kBlock;
    if (block < owned) store(block, holds_rows(block * kBlock) ? stored : kPadding);
    if (warp_ != 0) return;
#pragma unroll 1
    for (int extra = kTileRows / kBlock; extra < owned; ++extra) store(extra, kPadding);
  }

  // ---- rowwise

  __device__ void quantize_rows(const Scaler<Config>& scaler) {
    if constexpr (Config::kScaling == Scaling::row) {
      quantize_whole_rows(scaler);
    } else {
      quantize_row_blocks(scaler);
    }
  }

  __device__ void quantize_whole_rows(const Scaler<Config>& scaler) {
    const int row = warp_ * kWarpRows + lane_ % kWarpRows;
    const bool exists = row < tile_.rows();
    const Scale scale = scaler(exists && !past() ? in_.rowwise.amax[row_ + row] : 0.0f);
    if (exists && lane_ < kWarpRows && first_column_ == 0) {
      static_cast<float*>(in_.rowwise.scale)[row_ + row] = past() ? kPadding : scale.stored;
    }
    store_rows([&](int r) { return encode_row(r, __shfl_sync(kAll, scale.factor, r)); });
  }

  // Lanes that share a row's scale make those of different rows, and hand them round.
  __device__ void quantize_row_blocks(const Scaler<Config>& scaler) {
    using Amaxes = RowAmaxes<Element, kLanes>;
    constexpr int kSlots = Amaxes::kCopies > 1 ? 1 : 2 * Amaxes::kPairs;  // scales of one lane
    const Amaxes amaxes(values_);
    float factors[kSlots];
    Stored stored[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int odd = kSlots == 1 ? lane_ % 2 : slot % 2;
      const Scale scale = scaler(widen<Element>(amaxes.pairs[slot / 2], odd));
      factors[slot] = scale.factor;
      stored[slot] = scale.stored;
    }
    const int row = warp_ * kWarpRows + 2 * Amaxes::first_pair(lane_);
    if (kSlots > 1) {
      store_row_scales(row, stored);
    } else if (lane_ % 4 < 2) {
      store_row_scales(row + lane_ % 2, stored);
    }
    store_rows([&](int r) {
      const float factor = kSlots == 1
                               ? __shfl_sync(kAll, factors[0], r / 2 * 4 + r % 2)
                               : __shfl_sync(kAll, factors[r % kSlots], r / kSlots, kLanes);
      return encode_row(r, factor);
    });
  }

  __device__ bool token_major() const {
    return Config::kScaling == Scaling::block_1x128 && in_.token_pitch != 0;
  }
  __device__ Space token_space() const {
    return {int32_t(in_.row_align), int32_t(in_.token_pitch)};
  }

  // Of neighbouring rows of the tile, the first of them `row`.
  template <int Count>
  __device__ void store_row_scales(int row, const Stored (&stored)[Count]) {
    const uint32_t across = blocks(columns_, kBlock), block = uint32_t(column_) / kBlock;
    if (block >= across) return;  // a lane may own a row but no column
    auto* to = static_cast<Stored*>(in_.rowwise.scale);
    uint32_t stride = across;
    int count = tile_.rows() - row;
    if (token_major()) {
      to += block * in_.token_pitch + place_of(groups_, tile_, token_space()) + row;
      stride = 1;
      if (past()) count = 0;
    } else {
      to += (row_ + row) * across + block;
    }
    to = opaque(to);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i < count) to[uint64_t(stride) * i] = past() ? kPadding : stored[i];
    }
  }

  __device__ void pad_token_scales() {
    const int owned = owned_places(groups_, tile_, token_space());
    auto* scales = static_cast<Stored*>(in_.rowwise.scale) +
                   first_column_ / kTileColumns * in_.token_pitch +
                   place_of(groups_, tile_, token_space());
    const int first = past() ? 0 : tile_.rows();
#pragma unroll 1
    for (int row = first + threadIdx.x; row < owned; row += kThreads) scales[row] = kPadding;
  }

  // ---- columnwise

  __device__ void quantize_columns(const Scaler<Config>& scaler) {
    Scale scales[kLaneColumns] = {};
    if constexpr (Config::kScaling == Scaling::row) {
      scale_whole_columns(scales, scaler);
      stage_columns(scales);
    } else {
      if constexpr (Config::kHadamard) {
        stage_transformed(scales, scaler);
      } else if constexpr (kBlock == kTileRows) {
        scale_tile_columns(scales, scaler);
      } else {
        scale_column_blocks(scales, scaler);
      }
      if constexpr (!Config::kHadamard) stage_columns(scales);
      store_column_scales(scales);
    }
  }

  __device__ void scale_whole_columns(Scale (&scales)[kLaneColumns],
                                      const Scaler<Config>& scaler) {
    if (!has_rows() && warp_ != 0) return;  // the first warp stores them
    float4 amax = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int64_t at = int64_t(tile_.group) * columns_ + column_;
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
    if (!has_rows()) return;
    scales[0] = scaler(widen_low<Element>(low));
    scales[1] = scaler(widen_high<Element>(low));
    scales[2] = scaler(widen_low<Element>(high));
    scales[3] = scaler(widen_high<Element>(high));
  }

  // Where all warps share a scale each makes those of 16 columns: the division is what costs.
  __device__ void scale_tile_columns(Scale (&scales)[kLaneColumns],
                                     const Scaler<Config>& scaler) {
    shared_.column_amax[warp_][lane_] =
        make_uint2(values_.column_pair_amax(0), values_.column_pair_amax(1));
    __syncthreads();
    const int column = warp_ * 16 + lane_ % 16;
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto* pairs = reinterpret_cast<const uint32_t*>(shared_.column_amax[w]);
      amax = maximum<Element>(amax, pairs[column / 2]);
    }
    const Scale scale = scaler(widen<Element>(amax, column % 2));
    if (lane_ < 16) {
      shared_.factors[column] = scale.factor;
      shared_.stored[column] = scale.stored;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      scales[c].factor = shared_.factors[lane_ * kLaneColumns + c];
      scales[c].stored = shared_.stored[lane_ * kLaneColumns + c];
    }
  }

  __device__ void stage_columns(const Scale (&scales)[kLaneColumns]) {
    this->encode_columns([&](int c, const float (&)[kWarpRows]) { return scales[c].factor; });
  }

  // After a transform the scales follow from what it gave.
  __device__ void stage_transformed(Scale (&scales)[kLaneColumns], const Scaler<Config>& scaler) {
    this->encode_columns([&](int c, const float (&run)[kWarpRows]) {
      float amax = 0.0f;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) amax = fmaxf(amax, fabsf(run[r]));
      scales[c] = scaler(amax);
      return scales[c].factor;
    });
  }

  __device__ void store_column_scales(const Scale (&scales)[kLaneColumns]) {
    if (!in_columns() || warp_ * kWarpRows % kBlock != 0) return;
    const int owned = owned_blocks();
    Stored* to = static_cast<Stored*>(in_.columnwise.scale) +
                 block_of<kBlock>(groups_, tile_) * columns_ + column_;
    const int block = warp_ * kWarpRows / kBlock;
    if (block < owned && holds_rows(block * kBlock)) {
      store_four(to + block * columns_, scales[0].stored, scales[1].stored, scales[2].stored,
                 scales[3].stored);
    } else if (block < owned) {
      store_four(to + block * columns_, kPadding, kPadding, kPadding, kPadding);
    }
    if (warp_ != 0) return;
#pragma unroll 1
    for (int extra = kTileRows / kBlock; extra < owned; ++extra) {
      store_four(to + extra * columns_, kPadding, kPadding, kPadding, kPadding);
    }
  }

  __device__ static void store_four(Stored* to, Stored a, Stored b, Stored c, Stored d) {
    if constexpr (sizeof(Stored) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
    } else {
      *reinterpret_cast<uchar4*>(to) = make_uchar4(a, b, c, d);
    }
  }
};

template <class Config, class Source>
__global__ void __launch_bounds__(kThreads, Config::kBlocksPerSm)
    quantize_kernel(const __grid_constant__ QuantizeArguments in,
                    const __grid_constant__ Source source) {
  __shared__ Shared<Config> shared;
  const RowGroups groups{in.split_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const RowTile tile = block_tile(groups, &shared.tile);
  if (tile.group < 0) return;
  TileQuantizer<Config>(in, groups, tile, blockIdx.y * kTileColumns, shared).run(source);
}

}  // namespace quantizing

// At least one copy, a fold or row sums; see quantize.h for what each needs.
template <class Config, class Source = TensorSource<typename Config::Element>>
static Status launch_quantize(const QuantizeArguments& in, cudaStream_t stream,
                              const Source& source = {}) {
  using namespace quantizing;
  if (Status status = check_rows(in); !status.ok()) return status;
  if (const char* broken = broken_requirement<Config>(in)) {
    return {static_cast<int>(cudaErrorInvalidValue), broken};
  }
  return launch_tiles("cudaLaunchKernelEx(quantize)", &quantize_kernel<Config, Source>, in, stream,
                      source);
}

}  // namespace fusegen
