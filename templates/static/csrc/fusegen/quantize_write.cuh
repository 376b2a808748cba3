// A tile's way out: codes of its rows to the rowwise copy, codes of its columns through shared
// memory to the transposed columnwise copy, and its partial row sums.
#pragma once

#include <type_traits>

#include "quantize_config.cuh"
#include "quantize_source.cuh"

namespace fusegen {

namespace quantizing {

template <class Config>
struct alignas(16) Shared {
  uint8_t stage[kTileColumns * Config::kLineBytes];
  uint2 column_amax[kWarps][32];  // packed, of 4 columns
  float sums[kWarps][kTileColumns];
  float scratch[kWarps * 4];
  float factors[kTileColumns];
  typename Config::Stored stored[kTileColumns];
  RowTile tile;
};

// One tile. Members are the same in all threads but for the lane's own columns.
template <class Config>
class TileWriter {
 public:
  __device__ TileWriter(const QuantizeArguments& in, const RowGroups& groups, const RowTile& tile,
                        int32_t first_column, Shared<Config>& shared)
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

 protected:
  using Element = typename Config::Element;
  using Format = typename Config::Format;

  __device__ bool past() const { return tile_.group == groups_.groups; }
  __device__ bool in_columns() const { return column_ < columns_; }
  // A warp without rows has zeros to stage and nothing to store: small groups have many of those.
  __device__ bool has_rows() const { return warp_ * kWarpRows < tile_.rows(); }
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

  // ---- rowwise

  // Rows that are encoded, and drawn for, at once: more take registers that kernels lack.
  static constexpr int kAtOnce = 4, kDrawn = 8;

  // Columns past the last one are zeros, and fill the pitch.
  template <class CodesOf>
  __device__ __forceinline__ void store_rows(CodesOf codes_of) {
    using Codes = std::conditional_t<Format::kBits == 8, uint32_t, uint16_t>;
    const int end = blocks(columns_ * Format::kBits, 128) * 128 / Format::kBits;
    const int count = column_ < end ? tile_.rows() - warp_ * kWarpRows : 0;
    const uint32_t pitch = uint32_t(in_.rowwise.pitch);
    uint8_t* to = opaque(static_cast<uint8_t*>(in_.rowwise.data) +
                         (row_ + warp_ * kWarpRows) * in_.rowwise.pitch +
                         column_ * Format::kBits / 8);
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kAtOnce) {
      if constexpr (Config::kStochastic) {
        if (first % kDrawn == 0) draw_rows(first);
      }
      Codes codes[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) codes[r] = Codes(here(codes_of(first + r)));
      if (first + kAtOnce <= count) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) store_codes(to + uint64_t(pitch) * (first + r), codes[r]);
      } else if (first < count) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
          if (first + r < count) store_codes(to + uint64_t(pitch) * (first + r), codes[r]);
        }
      }
    }
  }

  template <class Codes>
  __device__ __forceinline__ static void store_codes(uint8_t* to, Codes codes) {
    *reinterpret_cast<Codes*>(to) = codes;
  }

  __device__ __forceinline__ uint32_t encode_row(int r, float factor) {
    float scaled[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) scaled[c] = values_.at(r, c) * factor;
    uint32_t codes;
    encode_values<Config>(&codes, scaled, random_ + (Config::kStochastic ? r % kDrawn : 0));
    return codes;
  }

  // Random bytes of kDrawn rows. A run of 16 columns is that of 4 lanes: each draws for every
  // fourth row, and 4 x 4 words change hands.
  __device__ __forceinline__ void draw_rows(int first) {
    constexpr int kRuns = kDrawn / 4;
    int64_t runs[kRuns];
    PhiloxWords drawn[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int64_t row = row_ + warp_ * kWarpRows + first + 4 * i + lane_ % 4;
      runs[i] = row * blocks(columns_, 16) + column_ / 16;
    }
    draw(drawn, in_.rng_state, runs, 0);
#pragma unroll
    for (int i = 0; i < kDrawn; ++i) {
      if (i % 4 == 0) turn_words(drawn[i / 4].words);
      random_[i] = drawn[i / 4].words[i % 4];
    }
  }

  // Word i of lane l of 4 becomes word l of lane i.
  __device__ __forceinline__ void turn_words(uint32_t (&words)[4]) const {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool upper = lane_ & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        const uint32_t low = words[i], high = words[i + distance];
        const uint32_t other = __shfl_xor_sync(kAll, upper ? low : high, distance);
        words[i] = upper ? other : low;
        words[i + distance] = upper ? high : other;
      }
    }
  }

  // ---- columnwise

  // Codes of 16 rows of each column, into shared memory; `factor_of(c, values)` scales them.
  template <class FactorOf>
  __device__ __forceinline__ void encode_columns(FactorOf factor_of) {
    if (!has_rows()) return stage_zeros();
    PhiloxWords random[2];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (Config::kStochastic && c % 2 == 0) draw_columns(random, c);
      float run[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] = values_.at(r, c);
      if constexpr (Config::kHadamard) hadamard(run);
      const float factor = factor_of(c, run);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) run[r] *= factor;
      uint32_t words[Config::kRunWords];
      encode_values<Config>(words, run, random[c % 2].words);
      stage(words, c);
    }
  }

  // Of two columns: more take registers, one alone would have the keys of the rounds to itself.
  __device__ __forceinline__ void draw_columns(PhiloxWords (&random)[2], int c) const {
    const int64_t block = block_of<kWarpRows>(groups_, tile_) + warp_;
    const int64_t run = block * columns_ + column_ + c;
    draw(random, in_.rng_state, {run, run + 1}, 1);
  }

  __device__ void stage_zeros() {
    const uint32_t words[Config::kRunWords] = {};
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) stage(words, c);
  }

  // The same from codes of rows.
  __device__ void stage_turned(const uint32_t (&codes)[kWarpRows]) {
    uint32_t words[kLaneColumns][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
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
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) stage(words[c], c);
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

  // The tile's lines, then zeros over what it owns beyond its 128 rows.
  __device__ void copy_columns() {
    constexpr int kPieceRows = kTileRows / Config::kPieces;
    const QuantizedCopy& copy = in_.columnwise;
    const Space space{int32_t(in_.row_align), int32_t(copy.pitch * 8 / Format::kBits)};
    const int owned = owned_places(groups_, tile_, space);
    const int64_t matrix = groups_.ragged() ? 0 : int64_t(tile_.group) * columns_ * copy.pitch;
    uint8_t* to = static_cast<uint8_t*>(copy.data) + matrix + first_column_ * copy.pitch +
                  int64_t(place_of(groups_, tile_, space)) * Format::kBits / 8;
    const int columns = min(kTileColumns, columns_ - first_column_);
    const int piece = threadIdx.x % Config::kPieces;
    const int first = threadIdx.x / Config::kPieces;
    const uint32_t pitch = uint32_t(copy.pitch);
    uint8_t* line = opaque(to + uint64_t(pitch) * first + piece * 16);
    constexpr int kStep = kThreads / Config::kPieces;
    const int count = piece * kPieceRows < owned ? columns - first : 0;
    uint4 pieces[kTileColumns / kStep];
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      pieces[i] =
          *reinterpret_cast<const uint4*>(shared_.stage + staged(first + i * kStep, piece));
    }
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      if (i * kStep >= count) continue;
      *reinterpret_cast<uint4*>(line + uint64_t(pitch) * (i * kStep)) = pieces[i];
    }
    const int extra = max(0, (owned - kTileRows) / kPieceRows);
#pragma unroll 1
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
  uint32_t random_[Config::kStochastic ? kDrawn : 1];  // of the lane's columns of each row
};

}  // namespace quantizing

}  // namespace fusegen
