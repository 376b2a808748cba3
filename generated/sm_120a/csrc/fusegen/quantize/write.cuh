// A tile's way out: codes of its rows to the rowwise copy, codes of its columns through shared
// memory to the transposed columnwise copy, and its partial row sums.
#pragma once

#include <type_traits>

#include "fusegen/quantize/config.cuh"
#include "fusegen/quantize/source.cuh"

namespace fusegen {

namespace quantizing {

// Random bytes of a warp's rows: a run of 16 columns has 4 words, one for each of 4 lanes. One row of
// each run is left out, so that its words fall into banks of their own.
struct RandomRows {
  uint32_t words[kWarps][kTileColumns / 16][kWarpRows + 1][4];
};
struct NoRandomRows {};

template <class Config>
struct alignas(16) Shared {
  uint8_t stage[kTileColumns * Config::kLineBytes];
  uint2 column_amax[kWarps][32];  // packed, of 4 columns
  alignas(16) float sums[kWarps][kTileColumns];
  float scratch[kWarps * 4];
  float factors[kTileColumns];
  typename Config::Stored stored[kTileColumns];
  // Of the group that begins with a warp, for the rowwise and for the columnwise copy: the factor of
  // its amax, and where blocks have scales below it the factor that each of their codes stands for.
  float group_factors[2][kWarps];
  float warp_amaxes[2][kWarps];  // of the partials that a warp has read
  float block_factors[2][kWarps][Config::kRule == Rule::nvfp4 ? kBlockCodes : 1];
  TileSlices slices;
  alignas(16) std::conditional_t<Config::kStochastic, RandomRows, NoRandomRows> random;
};

// One tile; a warp has a slice of it, a lane its own columns.
template <class Config>
class TileWriter {
 public:
  __device__ TileWriter(const QuantizeArguments& in, const RowGroups& groups, int32_t tile,
                        int32_t first_column, Shared<Config>& shared)
      : in_(in),
        groups_(groups),
        tile_(tile),
        columns_(int32_t(in.columns)),
        first_column_(first_column),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        column_(first_column + lane_ * kLaneColumns),
        shared_(shared) {}

 protected:
  using Element = typename Config::Element;
  using Format = typename Config::Format;

  // The warp's slice, and its first row in the input.
  __device__ __forceinline__ const Slice& slice() const { return shared_.slices[warp_]; }
  __device__ __forceinline__ int64_t first_row() const { return input_row(groups_, slice()); }

  __device__ bool past() const { return slice().group == groups_.groups; }
  __device__ bool in_columns() const { return column_ < columns_; }
  // A warp without rows has zeros to stage and nothing to store.
  __device__ bool has_rows() const { return slice().rows() > 0; }
  // Of any warp of the tile. Called by whole warps, as what follows is.
  __device__ bool tile_has_rows() const {
    return __any_sync(kAll, lane_ < kSlices && shared_.slices[lane_ % kSlices].rows() > 0);
  }
  // Whether the columnwise copy has a place for any row or padding of the tile.
  __device__ bool tile_owns_places() const {
    const Slice& slice = shared_.slices[lane_ % kSlices];
    return __any_sync(kAll, owned_places(groups_, slice, copy_space()) > 0);
  }
  __device__ Space copy_space() const {
    return {int32_t(in_.row_align), int32_t(in_.columnwise.pitch * 8 / Format::kBits)};
  }
  __device__ static int32_t blocks(int32_t extent, int size) {
    return int32_t((uint32_t(extent) + size - 1) / size);
  }

  // ---- of rows that the tile and a group share

  // Whether the warp is the first of the tile with rows of its group.
  __device__ bool is_first() const { return warp_ == 0 || shared_.slices[warp_ - 1].group != slice().group; }

  __device__ void fold_amax() {
    const float amax = warp_amax(values_.amax());
    if (lane_ == 0) shared_.scratch[warp_] = amax;
    __syncthreads();
    const uint32_t own = slices_of(shared_.slices, slice().group, lane_);
    if (is_first() && !past()) {
      const float all = warp_amax(own >> lane_ & 1 ? shared_.scratch[lane_ % kWarps] : 0.0f);
      if (lane_ == 0) raise(in_.folded_amax + slice().group, all);
    }
    __syncthreads();
  }

  // Sums have a fixed order. They meet in shared memory, where the block's next barrier finds them.

  __device__ bool leaves_sums() const {
    return tile_has_rows() && shared_.slices[0].group < groups_.groups;
  }

  __device__ void stage_sums() {
    if (!leaves_sums()) return;
    float sums[kLaneColumns] = {};
    if (has_rows()) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) sums[c] += values_.at(r, c);
      }
    }
    *reinterpret_cast<float4*>(&shared_.sums[warp_][lane_ * kLaneColumns]) =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
  }

  __device__ void store_sums() {
    const int column = first_column_ + threadIdx.x;
    if (!leaves_sums() || threadIdx.x >= kTileColumns || column >= columns_) return;
    const Slice& front = shared_.slices[0];
    float sum = 0.0f;
    if (front.group == shared_.slices[kWarps - 1].group) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.sums[w][threadIdx.x];
      in_.row_sums[segment(front) * columns_ + column] = sum;
      return;
    }
    bool has_rows = false;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Slice& slice = shared_.slices[w];
      sum += shared_.sums[w][threadIdx.x];
      has_rows |= slice.rows() > 0;
      if (w + 1 < kWarps && shared_.slices[w + 1].group == slice.group) continue;
      if (has_rows && slice.group < groups_.groups) {
        in_.row_sums[segment(slice) * columns_ + column] = sum;
      }
      sum = 0.0f;
      has_rows = false;
    }
  }

  // The number of the rows that the tile and a slice's group share: see row_sums.cuh.
  __device__ int64_t segment(const Slice& slice) const {
    if (groups_.ragged()) return int64_t(tile_) + slice.group;
    return int64_t(slice.group) * tiles_of(groups_.rows) + slice.row / kTileRows;
  }

  // ---- rowwise

  static constexpr int kAtOnce = 4;  // rows that are encoded: more take registers that kernels lack

  static constexpr int kWordRows = 32 / (kLaneColumns * Format::kBits);  // whose codes fill a word

  // `word_of(r)` has codes of kWordRows rows from r on. Columns past the last one are zeros, and fill
  // the pitch.
  template <class WordOf>
  __device__ __forceinline__ void store_rows(WordOf word_of) {
    using Codes = std::conditional_t<Format::kBits == 8, uint32_t, uint16_t>;
    const int end = blocks(columns_ * Format::kBits, 128) * 128 / Format::kBits;
    const int count = column_ < end ? slice().rows() : 0;
    const uint32_t pitch = uint32_t(in_.rowwise.pitch);
    uint8_t* to = opaque(static_cast<uint8_t*>(in_.rowwise.data) +
                         first_row() * pitch + column_ * Format::kBits / 8);
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kAtOnce) {
      Codes codes[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; r += kWordRows) {
        const uint32_t word = here(word_of(first + r));
#pragma unroll
        for (int i = 0; i < kWordRows; ++i) codes[r + i] = Codes(word >> (i * 32 / kWordRows));
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (first + r < count) store_codes(to, codes[r]);
        to = opaque(to + pitch);
      }
    }
  }

  template <class Codes>
  __device__ __forceinline__ static void store_codes(uint8_t* to, Codes codes) {
    *reinterpret_cast<Codes*>(to) = codes;
  }

  // What is encoded of an element: of E2M1 the magnitude, since signs come from pairs.
  __device__ __forceinline__ static float encoded(float value) {
    return Format::kBits == 4 ? fabsf(value) : value;
  }

  // Codes of kWordRows rows from r on, each scaled by its factor_of(row).
  template <class FactorOf>
  __device__ __forceinline__ uint32_t encode_rows(int r, FactorOf factor_of) {
    float scaled[kWordRows * kLaneColumns];
    uint32_t random[kWordRows] = {};
#pragma unroll
    for (int i = 0; i < kWordRows; ++i) {
      const float factor = factor_of(r + i);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        scaled[i * kLaneColumns + c] = encoded(values_.at(r + i, c)) * factor;
      }
      if constexpr (Config::kStochastic) random[i] = shared_.random.words[warp_][lane_ / 4][r + i][lane_ % 4];
    }
    uint32_t codes;
    encode_values<Config>(&codes, scaled, random);
    return Format::kBits == 4 ? with_signs(codes, values_.row_signs(r)) : codes;
  }

  // Each lane draws for every fourth row of its run of 16 columns, and 4 lanes share what they drew. As
  // many rows at once as registers allow: they share the keys of the rounds.
  __device__ __forceinline__ void draw_rows() {
    if constexpr (Config::kHadamard) {
      draw_every_fourth<4>(lane_ % 4);
    } else {
#pragma unroll 1
      for (int r = lane_ % 4; r < kWarpRows; r += 8) draw_every_fourth<2>(r);
    }
    __syncwarp();
  }

  template <int kRows>
  __device__ __forceinline__ void draw_every_fourth(int row) {
    const int64_t across = blocks(columns_, 16), first = (first_row() + row) * across + column_ / 16;
    int64_t runs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) runs[i] = first + 4 * i * across;
    PhiloxWords drawn[kRows];
    draw(drawn, in_.rng_state, runs, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t* words = drawn[i].words;
      *reinterpret_cast<uint4*>(shared_.random.words[warp_][lane_ / 4][row + 4 * i]) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // ---- columnwise

  // Codes of 16 rows of each column, into shared memory; `factor_of(c, pairs)` scales them, by what
  // a transform gave, where there is one, in pairs of 16 bits.
  template <class FactorOf>
  __device__ __forceinline__ void encode_columns(FactorOf factor_of) {
    PhiloxWords random[2];
    uint2 of_two[kWarpRows / 8];  // signs of two columns
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (Config::kStochastic && c % 2 == 0) draw_columns(random, c);
      float run[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] = values_.at(r, c);
      uint32_t pairs[kWarpRows / 2] = {};
      if constexpr (Config::kHadamard) hadamard(run, pairs);
      const float factor = factor_of(c, pairs);
      Signs signs;
      if constexpr (Config::kHadamard) transformed_signs(signs, pairs);  // before they take registers
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] = encoded(run[r]) * factor;
      uint32_t words[Config::kRunWords];
      encode_values<Config>(words, run, random[c % 2].words);
      if constexpr (Format::kBits == 4) {
        if constexpr (!Config::kHadamard) column_signs(signs, of_two, c);
#pragma unroll
        for (int w = 0; w < kWarpRows / 8; ++w) words[w] = with_signs(words[w], signs[w]);
      }
      stage(words, c);
    }
  }

  using Signs = uint32_t[kWarpRows / 8];

  __device__ __forceinline__ static void transformed_signs(Signs& signs,
                                                           const uint32_t (&pairs)[kWarpRows / 2]) {
#pragma unroll
    for (int w = 0; w < kWarpRows / 8; ++w) {
      const uint32_t* run = pairs + 4 * w;
      signs[w] = here(signs_along({run[0], run[1], run[2], run[3]}));
    }
  }

  // Signs of column c; at an even one those of two are made.
  __device__ __forceinline__ void column_signs(Signs& signs, uint2 (&of_two)[kWarpRows / 8], int c) const {
#pragma unroll
    for (int w = 0; w < kWarpRows / 8; ++w) {
      if (c % 2 == 0) of_two[w] = values_.column_signs(8 * w, c / 2);
      signs[w] = c % 2 == 0 ? of_two[w].x : of_two[w].y;
    }
  }

  // Of two columns: more take registers, one alone would have the keys of the rounds to itself.
  __device__ __forceinline__ void draw_columns(PhiloxWords (&random)[2], int c) const {
    const int64_t run = block_of<kWarpRows>(groups_, slice()) * columns_ + column_ + c;
    draw(random, in_.rng_state, {run, run + 1}, 1);
  }

  __device__ void stage_zeros() {
    const uint32_t words[Config::kRunWords] = {};
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) stage(words, c);
  }

  // Codes of rows r and r + 1, each scaled by its factor_of(column): a byte for columns 0, 2, 1 and 3.
  template <class FactorOf>
  __device__ __forceinline__ uint32_t encode_transposed(int r, FactorOf factor_of) const {
    float scaled[2 * kLaneColumns];
#pragma unroll
    for (int i = 0; i < 2 * kLaneColumns; ++i) {
      const int c = i / 4 + i / 2 % 2 * 2;
      scaled[i] = encoded(values_.at(r + i % 2, c)) * factor_of(c);
    }
    uint32_t codes;
    encode_values<Config>(&codes, scaled, nullptr);
    return with_signs(codes, values_.transposed_signs(r));
  }

  // Those of all rows, into shared memory.
  __device__ __forceinline__ void stage_columns_of(const uint32_t (&codes)[kWarpRows / 2]) {
    uint32_t words[kLaneColumns][2];
    transpose_bytes(codes, words);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) stage(words[c / 2 + c % 2 * 2], c);
  }

  // Codes of rows, transposed, into shared memory.
  __device__ void stage_transposed(const uint32_t (&codes)[kWarpRows / kWordRows]) {
    uint32_t words[kLaneColumns][Config::kRunWords];
    if constexpr (Format::kBits == 8) {
      transpose_bytes(codes, words);
    } else {
      transpose_nibbles(codes, words);
    }
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) stage(words[c], c);
  }

  // 4 x 4 bytes at a time.
  template <int kWords>
  static __device__ __forceinline__ void transpose_bytes(const uint32_t (&codes)[4 * kWords],
                                                         uint32_t (&words)[kLaneColumns][kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t* rows = codes + 4 * w;
      const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140);   // columns 0, 0, 1, 1
      const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362);  // columns 2, 2, 3, 3
      const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140);
      const uint32_t high23 = __byte_perm(rows[2], rows[3], 0x7362);
      words[0][w] = __byte_perm(low01, low23, 0x5410);
      words[1][w] = __byte_perm(low01, low23, 0x7632);
      words[2][w] = __byte_perm(high01, high23, 0x5410);
      words[3][w] = __byte_perm(high01, high23, 0x7632);
    }
  }

  // Bytes of even and of odd rows, each of two columns beside each other, are put together; then
  // nibbles change places.
  static __device__ __forceinline__ void transpose_nibbles(const uint32_t (&codes)[kWarpRows / 2],
                                                           uint32_t (&words)[kLaneColumns][2]) {
    constexpr uint32_t kLow = 0x0F0F0F0Fu;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t pairs[2][2];  // of columns; of even and odd rows
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t* rows = codes + 4 * w;  // two to a word
        const uint32_t first = __byte_perm(rows[0], rows[1], odd ? 0x7362 : 0x5140);
        const uint32_t last = __byte_perm(rows[2], rows[3], odd ? 0x7362 : 0x5140);
        pairs[0][odd] = __byte_perm(first, last, 0x5410);
        pairs[1][odd] = __byte_perm(first, last, 0x7632);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[2 * i][w] = (pairs[i][0] & kLow) | ((pairs[i][1] << 4) & ~kLow);
        words[2 * i + 1][w] = ((pairs[i][0] >> 4) & kLow) | (pairs[i][1] & ~kLow);
      }
    }
  }

  // Where piece `piece` of 16 bytes of a column of the tile stands.
  __device__ static int staged(int column, int piece) {
    const int swizzled = piece ^ (column / kLaneColumns % Config::kPieces);
    return column * Config::kLineBytes + swizzled * 16;
  }

  __device__ __forceinline__ void stage(const uint32_t (&words)[Config::kRunWords], int c) {
    uint8_t* const to = shared_.stage + c * Config::kLineBytes;  // a lane's columns are swizzled alike
    if constexpr (Format::kBits == 8) {
      *reinterpret_cast<uint4*>(to + staged(lane_ * kLaneColumns, warp_)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(to + staged(lane_ * kLaneColumns, warp_ / 2) + warp_ % 2 * 8) =
          make_uint2(words[0], words[1]);
    }
  }

  // The tile's lines: pieces whose places their group owns.
  __device__ void copy_columns() {
    constexpr int kPieceRows = kTileRows / Config::kPieces;
    constexpr int kStep = kThreads / Config::kPieces;
    const QuantizedCopy& copy = in_.columnwise;
    const int piece = threadIdx.x % Config::kPieces;
    const int first = threadIdx.x / Config::kPieces;
    const Slice slice = shared_.slices[piece * kPieceRows / kSliceRows];
    const Space space = copy_space();
    const uint32_t pitch = uint32_t(copy.pitch);
    const int64_t matrix = groups_.ragged() ? 0 : int64_t(slice.group) * columns_;
    uint8_t* line = opaque(static_cast<uint8_t*>(copy.data) +
                           (matrix + first_column_ + first) * pitch +
                           int64_t(place_of(groups_, slice, space)) * Format::kBits / 8);
    const int columns = min(kTileColumns, columns_ - first_column_);
    const int count = owns_place(groups_, slice, space) ? columns - first : 0;
    static_assert(kStep / kLaneColumns % Config::kPieces == 0, "swizzled alike");
    const uint8_t* from = shared_.stage + staged(first, piece);
    uint4 pieces[kTileColumns / kStep];
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      pieces[i] = *reinterpret_cast<const uint4*>(from + i * kStep * Config::kLineBytes);
    }
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      if (i * kStep >= count) continue;
      *reinterpret_cast<uint4*>(line + uint64_t(pitch) * (i * kStep)) = pieces[i];
    }
  }

  const QuantizeArguments& in_;
  const RowGroups& groups_;
  const int32_t tile_;
  const int32_t columns_, first_column_;
  const int lane_, warp_;
  const int32_t column_;  // the lane's first
  Shared<Config>& shared_;
  Values<Element> values_;
};

}  // namespace quantizing

}  // namespace fusegen
