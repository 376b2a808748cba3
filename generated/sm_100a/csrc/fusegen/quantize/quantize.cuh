// Quantise kernels: one read of the input writes the rowwise and the transposed columnwise copy.
//
// A block of threads owns a tile of 128 places and 128 columns, held in registers (see
// quantize/places.cuh and quantize/tile.cuh); 4 blocks share an SM, so that while one waits the loads of others are in
// flight. Rowwise codes are stored from registers, a line per warp and row. Columnwise codes meet
// in shared memory: a thread has 16 rows of a column, 16 bytes, and the copy out writes 8 such
// pieces of a column as one line. Pieces are swizzled by their column so that neither side has
// bank conflicts. Results do not depend on timing: maxima are exact and sums have a fixed order.
#pragma once

#include "fusegen/common/ceil_div.h"
#include "fusegen/quantize/amax.cuh"
#include "fusegen/quantize/write.cuh"

namespace fusegen {

namespace quantizing {

// One tile: its scales, and what they are multiplied into.
template <class Config>
class TileQuantizer : TileWriter<Config> {
  using Base = TileWriter<Config>;
  using Base::in_, Base::groups_, Base::shared_, Base::values_,
      Base::lane_, Base::warp_, Base::columns_, Base::first_column_, Base::column_, Base::slice, Base::first_row,
      Base::blocks, Base::past, Base::in_columns, Base::has_rows, Base::encode_rows,
      Base::store_rows;
  using Element = typename Config::Element;
  using Format = typename Config::Format;
  using Scaling = typename Config::Scaling;
  using Stored = typename Config::Stored;
  using Scale = typename Scaler<Config>::Scale;
  using Base::kWordRows;
  static constexpr int kBlock = Config::kBlock;
  static constexpr int kLanes = kBlock ? kBlock / kLaneColumns : 32;  // that share a row's scale
  // Scale of no rows.
  static constexpr Stored kPadding = Config::kRule != Rule::ratio ? 0 : Scaling::kExponents ? 127 : 1;
  // Whether what follows from zeros, which values of no rows are, may be another scale.
  static constexpr bool kPads = Config::kRule == Rule::ratio;

 public:
  using Base::Base;

  // `find_amaxes`: not where a tile before this one, of the same rows, has found those of groups.
  template <class Source>
  __device__ __forceinline__ void run(const Source& source, bool find_amaxes) {
    if (is_padding()) return pad();
    load(source);
    if (kGroupAmax && in_.scale == nullptr && find_amaxes) find_group_factors();
    if (in_.folded_amax != nullptr) this->fold_amax();
    if (in_.row_sums != nullptr) this->stage_sums();
    settle_signs();
    if constexpr (Config::kSquare || Scaling::kTensor) {
      quantize_by_one_scale();
    } else {
      quantize_copies();
    }
    __syncthreads();
    if (in_.columnwise.data != nullptr) this->copy_columns();
    if (in_.row_sums != nullptr) this->store_sums();
  }

 private:
  template <class Source>
  __device__ __forceinline__ void load(const Source& source) {
    source.load(values_, in_, first_row(), column_, past() ? 0 : slice().rows());
    let_next_kernel_start();
    if constexpr (Config::kStochastic) {  // while the loads are under way
      if (in_.rowwise.data != nullptr && has_rows()) this->draw_rows();
    }
  }

  // Codes of 4 bits take the signs of elements, that of NaN, too, which is positive. Amaxes of rows find
  // NaN themselves, and a transform leaves none with a sign.
  __device__ __forceinline__ void settle_signs() {
    if constexpr (Format::kBits == 4) {
      if (Config::kSquare || (in_.rowwise.data == nullptr && !Config::kHadamard)) values_.quiet_nans();
    }
  }

  // Whether padding is all that the tile has: past all groups, and where blocks are as high as tiles
  // below many a group's last rows. Elsewhere a group without rows still has a scale.
  __device__ bool is_padding() const {
    const bool past_all = shared_.slices[0].group == groups_.groups;
    return (kBlock == kTileRows || past_all) && !this->tile_has_rows();
  }

  __device__ void pad() {
    let_next_kernel_start();
    if constexpr (Scaling::kTokenMajor) {
      if (in_.rowwise.data != nullptr && token_major()) pad_token_scales();
    }
    if constexpr (Config::kAtoms) pad_row_atoms();
    if constexpr (Config::kSquare) store_square(kPadding);
    if (in_.columnwise.data == nullptr) return;
    if constexpr (kBlock > 0 && !Config::kSquare) store_column_scales({});
    if (!this->tile_owns_places()) return;
    this->stage_zeros();
    __syncthreads();
    this->copy_columns();
  }

  // Whether scales follow from the amax of a group, in whole or in part.
  static constexpr bool kGroupAmax = Scaling::kTensor || Config::kRule == Rule::nvfp4;

  // The largest of those partial amaxes of the warp's group that are its share: warps of one group
  // read them side by side, so that a dense tensor's take one trip to the L2 cache.
  __device__ __forceinline__ float warp_partial(const float* of_groups) const {
    if (of_groups == nullptr || past()) return 0.0f;
    const uint32_t own = slices_of(shared_.slices, slice().group, lane_);
    const int index = __popc(own & ((1u << warp_) - 1)), sharing = __popc(own);
    const PartialRange range =
        partials_of(groups_, slice(), int32_t(in_.row_align), tiles_across(columns_));
    const float* of_group = of_groups + int64_t(slice().group) * kAmaxPartials;
    float amax = 0.0f;
#pragma unroll 2
    for (int i = index * 32 + lane_; i < range.count; i += sharing * 32) {
      amax = fmaxf(amax, of_group[range.block(i)]);
    }
    return warp_amax(amax);
  }

  // Of each group of the tile, by its first warp; and the results, by the group's first slice.
  __device__ void find_group_factors() {
    const float rowwise = warp_partial(in_.rowwise.amax);
    const bool one = in_.columnwise.amax == in_.rowwise.amax;  // as usual
    const float columnwise = one ? rowwise : warp_partial(in_.columnwise.amax);
    if (lane_ == 0) {
      shared_.warp_amaxes[0][warp_] = rowwise;
      shared_.warp_amaxes[1][warp_] = columnwise;
    }
    __syncthreads();
    const uint32_t own = slices_of(shared_.slices, slice().group, lane_);
    if (this->is_first()) {
      const bool owner = slice().row == 0 && first_column_ == 0 && !past();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float amax =
            warp_amax(own >> lane_ & 1 ? shared_.warp_amaxes[i][lane_ % kWarps] : 0.0f);
        float* result = i == 0 ? in_.rowwise.group_amax : in_.columnwise.group_amax;
        if (lane_ != 0) continue;
        shared_.group_factors[i][warp_] = group_factor(amax);
        if (owner && result != nullptr) result[slice().group] = amax;
      }
    }
    __syncthreads();
    if constexpr (Config::kRule == Rule::nvfp4) fill_block_factors();
  }

  __device__ float group_factor(float amax) const {
    if constexpr (Config::kRule == Rule::nvfp4) {
      return nvfp4_tensor_scale(amax);
    } else {
      return Scaler<Config>(in_)(amax).factor;
    }
  }

  // Each takes a division: a thread makes one for each group, where its rows and columns have 8.
  __device__ void fill_block_factors() {
    static_assert(2 * kBlockCodes == kThreads);
    const int copy = threadIdx.x / kBlockCodes, code = threadIdx.x % kBlockCodes;
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) {
      if (w > 0 && shared_.slices[w - 1].group == shared_.slices[w].group) continue;
      const float inverse = 1.0f / shared_.group_factors[copy][w];
      shared_.block_factors[copy][w][code] = nvfp4_block_scale(code, inverse);
    }
    __syncthreads();
  }

  // The first of the tile's warps that has the warp's group.
  __device__ int first_warp() const {
    return __ffs(int(slices_of(shared_.slices, slice().group, lane_))) - 1;
  }

  __device__ Scaler<Config> scaler(bool columnwise, int warp) const {
    Scaler<Config> scaler(in_);
    if constexpr (Config::kRule == Rule::nvfp4) {
      scaler.tensor_scale = shared_.group_factors[columnwise][warp];
      scaler.factors = shared_.block_factors[columnwise][warp];
    }
    return scaler;
  }

  // ---- one scale for a group or a square block

  __device__ __forceinline__ void quantize_by_one_scale() {
    const Scale scale = shared_scale();
    if (has_rows()) {
      quantize_with(scale);
    } else if (in_.columnwise.data != nullptr) {
      this->stage_zeros();
    }
  }

  // Codes are the same in both copies: they are transposed in registers.
  __device__ void quantize_with(const Scale& scale) {
    uint32_t codes[kWarpRows / kWordRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; r += kWordRows) {
      codes[r / kWordRows] = encode_rows(r, [&](int) { return scale.factor; });
    }
    if (in_.rowwise.data != nullptr) store_rows([&](int r) { return codes[r / kWordRows]; });
    if (in_.columnwise.data != nullptr) this->stage_transposed(codes);
  }

  __device__ Scale shared_scale() {
    if constexpr (Scaling::kTensor) {
      return tensor_scale();
    } else {
      const Scale scale = scaler(in_.rowwise.data == nullptr, first_warp())(square_amax());
      store_square(scale.stored);
      return scale;
    }
  }

  __device__ Scale tensor_scale() {
    const int32_t group = past() ? groups_.groups - 1 : slice().group;
    const float factor = in_.scale != nullptr
                             ? in_.scale[group]
                             : shared_.group_factors[in_.rowwise.amax == nullptr][first_warp()];
    if (lane_ == 0 && slice().row == 0 && first_column_ == 0 && !past()) {
      for (void* scales : {in_.rowwise.scale, in_.columnwise.scale}) {
        if (scales != nullptr) static_cast<float*>(scales)[group] = 1.0f / factor;
      }
    }
    return {factor, 0.0f};
  }

  // Warps beside each other share a block of more than 16 rows, runs of lanes its columns.
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

  // Whether the warp stores the scales of a block of rows: the first of those that share it, if its
  // group owns the block.
  __device__ bool stores_block() const {
    const Space space{kBlock, blocks(groups_.rows, kBlock) * kBlock};
    return slice().row % kBlock == 0 && owns_place(groups_, slice(), space);
  }
  __device__ bool holds_rows() const { return !past() && has_rows(); }

  __device__ void store_square(Stored stored) {
    if constexpr (Config::kAtoms) return store_square_atoms(stored);
    if (lane_ % kLanes != 0 || !in_columns() || !stores_block()) return;
    const int64_t at =
        block_of<kBlock>(groups_, slice()) * blocks(columns_, kBlock) + column_ / kBlock;
    for (void* scales : {in_.rowwise.scale, in_.columnwise.scale}) {
      if (scales != nullptr) static_cast<Stored*>(scales)[at] = holds_rows() ? stored : kPadding;
    }
  }

  // ---- scales of its own for each copy

  __device__ __forceinline__ void quantize_copies() {
    const int first = first_warp();
    const Scaler<Config> rows = scaler(0, first), columns = scaler(1, first);
    const bool both = in_.rowwise.data != nullptr && in_.columnwise.data != nullptr;
    if constexpr (Config::kTogether) {
      if (both) return quantize_together(rows, columns);
    }
    if (in_.rowwise.data != nullptr) {
      if (has_rows()) {
        quantize_rows(rows);
      } else if constexpr (Scaling::kTokenMajor) {
        if (token_major()) pad_token_scales();
      } else if constexpr (Config::kAtoms) {
        pad_row_atoms();
      }
    }
    if (in_.columnwise.data != nullptr) quantize_columns(columns);
  }

  // ---- both copies of the same values: each is read once

  __device__ __forceinline__ void quantize_together(const Scaler<Config>& rows, const Scaler<Config>& columns) {
    if (!has_rows()) {
      if constexpr (Config::kAtoms) pad_row_atoms();
      return pad_columns();
    }
    Scale scales[kLaneColumns];
    scale_column_blocks(scales, columns);
    store_column_scales(scales);
    uint32_t transposed[kWarpRows / 2];
    quantize_row_blocks(rows, [&](int r, auto factor_of) {
      transposed[r / 2] = here(this->encode_transposed(r, [&](int c) { return scales[c].factor; }));
      return this->encode_rows(r, factor_of);
    });
    this->stage_columns_of(transposed);
  }

  // ---- rowwise

  __device__ void quantize_rows(const Scaler<Config>& scaler) {
    if constexpr (Scaling::kRow) {
      quantize_whole_rows(scaler);
    } else {
      quantize_row_blocks(scaler, [&](int r, auto factor_of) { return this->encode_rows(r, factor_of); });
    }
  }

  __device__ void quantize_whole_rows(const Scaler<Config>& scaler) {
    const int row = lane_ % kWarpRows;
    const bool exists = row < slice().rows();
    const Scale scale = scaler(exists && !past() ? in_.rowwise.amax[first_row() + row] : 0.0f);
    if (exists && lane_ < kWarpRows && first_column_ == 0) {
      static_cast<float*>(in_.rowwise.scale)[first_row() + row] = past() ? kPadding : scale.stored;
    }
    store_rows([&](int r) {
      return encode_rows(r, [&](int row) { return __shfl_sync(kAll, scale.factor, row); });
    });
  }

  // Lanes that share a row's scale make those of different rows, and hand them round to
  // `encode(row, factor_of)`.
  template <class Encode>
  __device__ __forceinline__ void quantize_row_blocks(const Scaler<Config>& scaler, Encode encode) {
    using Amaxes = RowAmaxes<Element, kLanes>;
    constexpr int kSlots = Amaxes::kCopies > 1 ? 1 : 2 * Amaxes::kPairs;  // scales of one lane
    Amaxes amaxes(values_, std::bool_constant<Format::kBits == 4>());
    if (Format::kBits == 4 && amaxes.any_nan()) {
      values_.quiet_all();
      amaxes = Amaxes(values_);
    }
    float factors[kSlots];
    Stored stored[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int odd = kSlots == 1 ? lane_ % 2 : slot % 2;
      const Scale scale = scaler(widen<Element>(amaxes.pairs[slot / 2], odd));
      factors[slot] = scale.factor;
      stored[slot] = scale.stored;
    }
    const int row = 2 * Amaxes::first_pair(lane_);
    if (kSlots > 1) {
      store_row_scales(row, uint32_t(column_) / kBlock, stored);
    } else if (lane_ % Amaxes::kCopies < 2) {
      store_row_scales(row + lane_ % 2, uint32_t(column_) / kBlock, stored);
    }
    const auto factor_of = [&](int r) {
      return kSlots == 1 ? __shfl_sync(kAll, factors[0], r / 2 * Amaxes::kCopies + r % 2, kLanes)
                         : __shfl_sync(kAll, factors[r % kSlots], r / kSlots, kLanes);
    };
    store_rows([&](int r) { return encode(r, factor_of); });
  }

  __device__ bool token_major() const {
    return Scaling::kTokenMajor && in_.token_pitch != 0;
  }
  __device__ Space token_space() const {
    return {int32_t(in_.row_align), int32_t(in_.token_pitch)};
  }

  // Of neighbouring rows of the slice, the first of them `row`; places have padding, too.
  template <int Count>
  __device__ void store_row_scales(int row, uint32_t block, const Stored (&stored)[Count]) {
    if constexpr (Config::kAtoms) return store_row_atoms(row, int32_t(block), stored);
    const uint32_t across = blocks(columns_, kBlock);
    if (block >= across) return;  // a lane may own a row but no column
    auto* to = static_cast<Stored*>(in_.rowwise.scale);
    uint32_t stride = across;
    int count = slice().rows() - row;
    const int exist = past() ? 0 : count;
    if (token_major()) {
      to += block * in_.token_pitch + place_of(groups_, slice(), token_space()) + row;
      stride = 1;
      count = owned_places(groups_, slice(), token_space()) - row;
    } else {
      to += (first_row() + row) * across + block;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i < count) *to = kPads && i >= exist ? kPadding : stored[i];
      to = opaque(to + stride);
    }
  }

  // Of a warp without rows.
  __device__ void pad_token_scales() {
    const Stored padding[1] = {kPadding};
#pragma unroll
    for (int i = 0; i < kTileColumns / kBlock; ++i) {
      if (lane_ < kWarpRows) store_row_scales(lane_, first_column_ / kBlock + i, padding);
    }
  }

  // ---- columnwise

  __device__ void quantize_columns(const Scaler<Config>& scaler) {
    if constexpr (kBlock == kWarpRows) {
      if (!has_rows()) return pad_columns();
    }
    Scale scales[kLaneColumns] = {};
    if constexpr (Scaling::kRow) {
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

  // Of a warp without rows, whose blocks are its own.
  __device__ void pad_columns() {
    const Scale none[kLaneColumns] = {};
    this->stage_zeros();
    store_column_scales(none);
  }

  __device__ void scale_whole_columns(Scale (&scales)[kLaneColumns],
                                      const Scaler<Config>& scaler) {
    if (!has_rows() && slice().row != 0) return;  // the group's first warp stores them
    float4 amax = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int64_t at = int64_t(slice().group) * columns_ + column_;
    const bool reads = in_columns() && !past();
    if (reads) amax = *reinterpret_cast<const float4*>(in_.columnwise.amax + at);
    scales[0] = scaler(amax.x);
    scales[1] = scaler(amax.y);
    scales[2] = scaler(amax.z);
    scales[3] = scaler(amax.w);
    if (reads && slice().row == 0) {
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
    if (!has_rows()) return this->stage_zeros();
    this->encode_columns([&](int c, const uint32_t (&)[kWarpRows / 2]) { return scales[c].factor; });
  }

  // After a transform the scales follow from what it gave.
  __device__ void stage_transformed(Scale (&scales)[kLaneColumns], const Scaler<Config>& scaler) {
    this->encode_columns([&](int c, const uint32_t (&pairs)[kWarpRows / 2]) {
      uint32_t largest = comparable<__nv_bfloat16>(pairs[0]);
#pragma unroll
      for (int i = 1; i < kWarpRows / 2; ++i) {
        largest = larger_magnitude<__nv_bfloat16>(largest, comparable<__nv_bfloat16>(pairs[i]));
      }
      const uint32_t amax = amax_of<__nv_bfloat16>(largest);
      scales[c] = scaler(fmaxf(widen_low<__nv_bfloat16>(amax), widen_high<__nv_bfloat16>(amax)));
      return scales[c].factor;
    });
  }

  __device__ void store_column_scales(const Scale (&scales)[kLaneColumns]) {
    if constexpr (Config::kAtoms) return store_column_atoms([&](int c) { return scales[c].stored; });
    if (!in_columns() || !stores_block()) return;
    Stored* to = static_cast<Stored*>(in_.columnwise.scale) +
                 block_of<kBlock>(groups_, slice()) * columns_ + column_;
    if (!kPads || holds_rows()) {
      store_four(to, scales[0].stored, scales[1].stored, scales[2].stored, scales[3].stored);
    } else {
      store_four(to, kPadding, kPadding, kPadding, kPadding);
    }
  }

  __device__ static void store_four(Stored* to, Stored a, Stored b, Stored c, Stored d) {
    if constexpr (sizeof(Stored) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
    } else {
      *reinterpret_cast<uchar4*>(to) = make_uchar4(a, b, c, d);
    }
  }

  // ---- scales in atoms, of which a tile has whole ones: see quantize/scale_atoms.cuh

  static constexpr int kAtomBlock = Scaling::kAtomBlock;
  static constexpr int kAlike = Config::kAtoms ? kBlock / kAtomBlock : 1;  // bytes of a scale

  // Tiles past all groups may have no place there.
  __device__ bool owns_atoms() const { return this->tile_ < atom_row_blocks(groups_); }

  __device__ static void store_alike(uint8_t* to, Stored stored) {
    static_assert(kAlike == 1 || kAlike == 2 || kAlike == 4);
    if constexpr (kAlike == 1) *to = stored;
    if constexpr (kAlike == 2) *reinterpret_cast<uint16_t*>(to) = uint16_t(stored * 0x0101u);
    if constexpr (kAlike == 4) *reinterpret_cast<uint32_t*>(to) = stored * 0x01010101u;
  }

  // Where a row of the slice has the byte of a block.
  __device__ uint8_t* row_atom(int row, int32_t byte, int32_t atoms) const {
    const int64_t line = int64_t(this->tile_) * kAtomRows + warp_ * kWarpRows + row;
    return static_cast<uint8_t*>(in_.rowwise.scale) + atom_place(line, byte, atoms);
  }

  // Of neighbouring rows of the slice; padding is 0.
  template <int Count>
  __device__ void store_row_atoms(int row, int32_t block, const Stored (&stored)[Count]) {
    const int32_t atoms = atoms_along(columns_, kAtomBlock);
    if (block * kAlike >= atoms * kAtomBlocks || !owns_atoms()) return;
    const bool none = past() || block >= blocks(columns_, kBlock);
    const int exist = none ? 0 : slice().rows() - row;
    uint8_t* to = row_atom(row, block * kAlike, atoms);
#pragma unroll
    for (int i = 0; i < Count; ++i) store_alike(to + i * kAtomRowBytes, i < exist ? stored[i] : Stored(0));
  }

  // Of a warp without rows.
  __device__ void pad_row_atoms() {
    constexpr int kWords = kTileColumns / (kAtomBlocks * kAtomBlock);  // of a row
    const int32_t atoms = atoms_along(columns_, kAtomBlock);
    const int32_t first = first_column_ / (kAtomBlocks * kAtomBlock) + lane_ / kWarpRows;
    if (in_.rowwise.data == nullptr || !owns_atoms()) return;
    if (first >= atoms || lane_ / kWarpRows >= kWords) return;
    *reinterpret_cast<uint32_t*>(row_atom(lane_ % kWarpRows, first * kAtomBlocks, atoms)) = 0;
  }

  // Lanes that share a block share its rows.
  __device__ void store_square_atoms(Stored stored) {
    const Stored one[1] = {stored};
    if (in_.rowwise.scale != nullptr) {
#pragma unroll
      for (int row = lane_ % kLanes; row < kWarpRows; row += kLanes) store_row_atoms(row, column_ / kBlock, one);
    }
    if (in_.columnwise.scale != nullptr) store_column_atoms([&](int) { return stored; });
  }

  // Of the lane's columns, by the first of the warps that share a block of rows.
  template <class StoredOf>
  __device__ void store_column_atoms(StoredOf stored_of) {
    if (slice().row % kBlock != 0 || !owns_atoms()) return;
    const int32_t atoms = atoms_along_rows(groups_, kAtomBlock);
    const int32_t byte = place_of(groups_, slice(), kAtomSpace) / kAtomBlock;
    const int32_t row_blocks = blocks(columns_, kAtomRows);
    if (byte >= atoms * kAtomBlocks || column_ >= row_blocks * kAtomRows) return;
    const int64_t matrix = groups_.ragged() ? 0 : int64_t(slice().group) * row_blocks * atoms * kAtomBytes;
    uint8_t* to = static_cast<uint8_t*>(in_.columnwise.scale) + matrix + atom_place(column_, byte, atoms);
    const bool exist = holds_rows() && in_columns();
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) store_alike(to + c * kAtomRowBytes, exist ? stored_of(c) : Stored(0));
  }
};

template <class Config, class Source>
inline constexpr int kBlocks =
    Config::kBlocksPerSm < Source::kBlocksPerSm ? Config::kBlocksPerSm : Source::kBlocksPerSm;

// Where a block works in the tensor of a launch. Launches of several have a place of their own: see
// quantize/several.cuh.
struct OnlyPlace {
  const QuantizeArguments& in;

  __device__ __forceinline__ explicit OnlyPlace(const QuantizeArguments& only) : in(only) {}
  __device__ __forceinline__ int32_t row_tile() const { return row_tile_from_last(); }
  __device__ __forceinline__ uint32_t column_block() const { return gridDim.y - 1 - blockIdx.y; }
};

// Whether several rows of what a source gives are one row of what it reads. A launch then walks all rows
// of a panel of columns before those of the next, so that what is read comes from memory once:
// `source.panel_columns()` says of how many columns the L2 cache holds that.
template <class Source>
inline constexpr bool kSharesRows = false;

// Panels of gridDim.y column blocks each, the last of which may have fewer, one after the other in z.
template <class Config>
struct PanelPlace {
  const QuantizeArguments& in;
  uint32_t column_blocks, super_rows;

  __device__ __forceinline__ explicit PanelPlace(const QuantizeArguments& only)
      : in(only),
        column_blocks(uint32_t(ceil_div(in.columns, Config::kColumnTiles * kTileColumns))),
        super_rows(gridDim.z / ((column_blocks + gridDim.y - 1) / gridDim.y)) {}

  __device__ __forceinline__ int32_t row_tile() const {
    if (column_block() >= column_blocks) return INT32_MAX;
    return blockIdx.z % super_rows * kSuperRow + blockIdx.x;
  }
  __device__ __forceinline__ uint32_t column_block() const {
    return blockIdx.z / super_rows * gridDim.y + blockIdx.y;
  }
};

template <class Config, class Source, class Place = OnlyPlace, class Launched = QuantizeArguments>
__global__ void __launch_bounds__(kThreads, kBlocks<Config, Source>)
    quantize_kernel(const __grid_constant__ Launched launched,
                    const __grid_constant__ Source source) {
  __shared__ Shared<Config> shared;
  const Place place(launched);
  const QuantizeArguments& in = place.in;
  const RowGroups groups{in.group_sizes, int32_t(in.rows), int32_t(in.groups)};
  wait_for_previous_kernel();
  const int32_t tile = place.row_tile();
  const Space space = work_space<Config>(in);
  if (tile >= row_tiles(groups, space)) return;
  tile_slices(groups, space, tile, shared.slices);
  constexpr int kColumns = Config::kColumnTiles * kTileColumns;
  int32_t column = place.column_block() * kColumns;
#pragma unroll 1
  while (true) {
    TileQuantizer<Config>(in, groups, tile, column, shared).run(source, column % kColumns == 0);
    column += kTileColumns;
    if (column % kColumns == 0 || column >= in.columns) return;
    __syncthreads();  // the tile's codes have been copied
  }
}

// Why a launch cannot quantise a tensor, if it cannot.
template <class Config>
Status check_quantize(const QuantizeArguments& in) {
  if (Status status = check_rows(in); !status.ok()) return status;
  if (const char* broken = broken_requirement<Config>(in)) {
    return {static_cast<int>(cudaErrorInvalidValue), broken};
  }
  return {};
}

// Column blocks of a panel of at most so many columns, panels alike.
inline int64_t panel_blocks(const TileGrid& grid, int64_t most) {
  const int64_t panels = ceil_div(grid.column_tiles, most > 0 ? most : 1);
  const int64_t most_panels = grid.super_rows > 0 ? kMostSuperRows / grid.super_rows : 1;
  return ceil_div(grid.column_tiles, panels < most_panels ? panels : most_panels);
}

template <class Config, class Source>
Status launch_panels(const QuantizeArguments& in, Stream& stream, const Source& source) {
  constexpr int kColumns = Config::kColumnTiles * kTileColumns;
  const TileGrid grid = tile_grid<kColumns>(in, work_space<Config>(in));
  if (Status status = check_grid(grid); !status.ok()) return status;
  const int64_t width = panel_blocks(grid, source.panel_columns() / kColumns);
  const dim3 all(kSuperRow, unsigned(width),
                 unsigned(grid.super_rows * ceil_div(grid.column_tiles, width)));
  return launch_kernel("cudaLaunchKernelEx(quantize panels)",
                       &quantize_kernel<Config, Source, PanelPlace<Config>>, Grid{all, kThreads},
                       stream, in, source);
}

}  // namespace quantizing

// At least one copy, a fold or row sums; see quantize.h for what each needs.
template <class Config, class Source = TensorSource<typename Config::Element>>
static Status launch_quantize(const QuantizeArguments& in, Stream& stream,
                              const Source& source = {}) {
  using namespace quantizing;
  if (Status status = check_quantize<Config>(in); !status.ok()) return status;
  if constexpr (kSharesRows<Source>) {
    return launch_panels<Config>(in, stream, source);
  } else {
    return launch_tiles<kTileColumns * Config::kColumnTiles>(
        "cudaLaunchKernelEx(quantize)", &quantize_kernel<Config, Source>, in,
        work_space<Config>(in), stream, source);
  }
}

}  // namespace fusegen
