// Quantises norms of rows, which themselves are neither written nor read, on Hopper: x is read once.
//
// A cluster of blocks has a band of 128 rows in its shared memory. Rows come as panels of 128 rows and
// 64 columns; a block has those of every so many columns that the norm's kernel has eight of its threads
// load, so that a thread here makes the very sum that one makes there, and sums of blocks are added in
// the order of that kernel's butterflies: statistics have its bits. A block has eight panels of a band,
// two of each of four teams of threads, which make a tile of 128 x 128 of them.
//
// A tile is held in registers once its rows have statistics. So its first panel's place takes one of a
// later band at once, its second one's after the codes of columns have met there; places for twelve panels
// have half of a band's under way even while statistics are found, and all of it while codes are made.
// Blocks wait for those of their own cluster alone, which the hardware starts together, and only at
// barriers that all of them pass equally often.
//
// What this has no code for, or a device no place, is the other kernel's: norm_quantize.cuh.
#pragma once

#include <algorithm>

#include "fusegen/launch/cluster.sm90.cuh"
#include "fusegen/launch/cta_memory.h"
#include "fusegen/load/own_copies.cuh"
#include "fusegen/norm/norm_quantize.cuh"

namespace fusegen {

namespace quantizing {

// A row's chains of additions that a block makes, a thread each: the vectors of a panel's row.
inline constexpr int kChains = 8;
inline constexpr int kPanelColumns = kChains * norm::kVector;
inline constexpr int kPanels = 8;  // of a block's part of a band: as many as vectors of a chain
inline constexpr int kPlaces = 12;
inline constexpr int kTeams = 4;   // a tile each
inline constexpr int kBandThreads = kTeams * kThreads;
static_assert(kTeams * kTileColumns == kPanels * kPanelColumns);
static_assert(kBandThreads == kTileRows * kChains, "a thread has a chain");

// Whether there is code for the scales and codes of a configuration.
template <class Config>
inline constexpr bool kInPanels =
    Config::Format::kBits == 8 && Config::kRule == Rule::ratio && !Config::kAtoms && !Config::kHadamard &&
    (Config::Scaling::kTensor || (Config::Scaling::kRows == 1 && Config::kBlock == kTileColumns));

// Blocks of a cluster: eight threads of the norm's kernel each. 0: none that has all of its chains.
inline int panel_ranks(int64_t columns) {
  if (columns > norm::kShortColumns) return 0;
  return norm::with_short_shape(columns, [](auto shape) {
    using S = decltype(shape);
    const int ranks = S::kTeam / kChains;
    return S::kVectors == kPanels && ranks <= kLargestCluster ? ranks : 0;
  });
}

using Panel = uint4[kTileRows][kChains];

template <class Config>
struct alignas(16) BandShared {
  Panel panels[kPlaces];
  float sums[2][kTileRows][kChains];  // of the exchange before, too, which others may still read
  float mean[kTileRows], rstd[kTileRows];
  uint32_t row_amax[kPanels][kTileRows / 2];  // packed, of two rows
  uint2 column_amax[kTeams][kWarps][32];      // packed, of 4 columns
  float factors[kTeams][kTileColumns];
  float stored[kTeams][kTileColumns];
  float warp_amax[kTeams * kWarps];
};
inline constexpr int kBandBytes = 220288;  // as the generator has it

// A block's part of the bands that its cluster has, in turns.
template <class Element>
struct BandShare {
  const NormArguments& norm;
  const int32_t log_ranks;  // blocks of a cluster, a power of two: no thread divides
  const int32_t bands;      // of all clusters

  // In words of the grid, not kept in registers.
  __device__ int32_t ranks() const { return 1 << log_ranks; }
  __device__ int32_t rank() const { return int32_t(blockIdx.x) & (ranks() - 1); }
  __device__ int32_t first() const { return int32_t(blockIdx.x) >> log_ranks; }
  __device__ int32_t step() const { return int32_t(gridDim.x) >> log_ranks; }

  __device__ bool has(int32_t turn) const { return first() + turn * step() < bands; }
  // From the last one on: what the kernel before has written last is still in the L2 cache.
  __device__ int32_t band(int32_t turn) const { return bands - 1 - (first() + turn * step()); }
  __device__ int32_t column(int panel) const { return ((panel << log_ranks) + rank()) * kPanelColumns; }

  // Begins to copy a panel of a turn's band, by one team.
  __device__ __forceinline__ void begin(Panel& to, int32_t turn, int panel) const {
    const int thread = threadIdx.x % kThreads, chain = thread % kChains;
    const int column = this->column(panel) + chain * norm::kVector;
    if (has(turn) && column < int(norm.columns)) {
      constexpr int kStep = kThreads / kChains;
      const int32_t row = band(turn) * kTileRows + thread / kChains;
      const int left = int(norm.rows) - row;
      const char* from = opaque(reinterpret_cast<const char*>(static_cast<const Element*>(norm.x) +
                                                              row * norm.columns + column));
      uint4* const place = &to[thread / kChains][chain];
#pragma unroll
      for (int r = 0; r < kTileRows; r += kStep) {
        if (r < left) copy_own(place + r * kChains, from);
        from = opaque(from + uint32_t(norm.columns) * uint32_t(kStep * sizeof(Element)));
      }
    }
    end_group_of_copies();
  }
};

// Where a block has the panels of a turn: the first half of them from `place` on, the second half
// four places further, in a ring.
struct Turn {
  static constexpr int kHalf = kPlaces - kPanels;
  static_assert(kPanels == 2 * kHalf && kPlaces == 3 * kHalf, "halves are never apart");
  int32_t number = 0, place = 0;

  __device__ __forceinline__ int32_t half(int i) const {
    const int32_t at = place + i * kHalf;
    return at < kPlaces ? at : at - kPlaces;
  }
  __device__ __forceinline__ Turn next() const {
    return {number + 1, place == 0 ? kPlaces - kHalf : place - kHalf};
  }
};

// Statistics of a band's rows: a thread has a chain of one row, whose others lie in other threads and
// blocks.
template <class Element, bool centred, class Shared>
class BandStatistics {
 public:
  __device__ BandStatistics(const BandShare<Element>& share, Shared& shared)
      : share_(share),
        shared_(shared),
        row_(threadIdx.x / kChains),
        chain_(threadIdx.x % kChains) {}

  // Of the band of a turn, whose panels are there. Called by the whole cluster.
  __device__ __forceinline__ void find(const Turn& turn) {
    const NormArguments& in = share_.norm;
    const int32_t row = share_.band(turn.number) * kTileRows + row_;
    const bool there = row < int32_t(in.rows);
    const float count = norm::count_of(in.kind, int(in.columns));
    float mean = 0.0f;
    if constexpr (centred) {
      float sum = 0.0f;
      if (there) {
        each_vector(turn, [&](const norm::Values& values) {
#pragma unroll
          for (int j = 0; j < norm::kVector; ++j) sum += values.of[j];
        });
      }
      mean = add_up(sum, 0) / count;
    }
    float squares = 0.0f;
    if (there) {
      each_vector(turn, [&](const norm::Values& values) {
#pragma unroll
        for (int j = 0; j < norm::kVector; ++j) {
          const float deviation = values.of[j] - mean;
          squares += deviation * deviation;
        }
      });
    }
    const float rstd = 1.0f / sqrtf(add_up(squares, centred ? 1 : turn.number % 2) / count + in.eps);
    if (chain_ == 0) {
      shared_.mean[row_] = mean;
      shared_.rstd[row_] = rstd;
      if (there && share_.rank() == 0) {
        if (centred && in.mean != nullptr) in.mean[row] = mean;
        if (in.rstd != nullptr) in.rstd[row] = rstd;
      }
    }
    __syncthreads();
  }

 private:
  template <class Use>
  __device__ __forceinline__ void each_vector(const Turn& turn, const Use& use) const {
    const int columns = int(share_.norm.columns) - chain_ * norm::kVector;
    const Panel* const halves[2] = {shared_.panels + turn.half(0), shared_.panels + turn.half(1)};
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      if (share_.column(i) >= columns) break;
      use(norm::unpack<Element>(halves[i / Turn::kHalf][i % Turn::kHalf][row_][chain_]));
    }
  }

  // The row's sum, of one of each of its chains, by the additions of `norm::add_up`: butterflies over
  // the lanes of warps, which four blocks have together, and over warps. `exchange` alternates: all that
  // read sums where they are written now have come to the barrier of the other ones since.
  __device__ __forceinline__ float add_up(float own, int exchange) const {
    float(&sums)[kTileRows][kChains] = shared_.sums[exchange];
    // Here, lest the compiler keep the addresses in all other blocks.
    float* const place = &sums[row_][here(uint32_t(chain_))];
    *place = own;
    arrive_at_cluster();
    wait_for_cluster();
    constexpr int kOfWarp = norm::kWarp / kChains, kMostWarps = kLargestCluster / kOfWarp;
    float total[kMostWarps][1] = {};
#pragma unroll
    for (int warp = 0; warp < kMostWarps; ++warp) {
      if (warp * kOfWarp >= share_.ranks()) continue;
      float of[kOfWarp];
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) of[i] = *of_rank(place, warp * kOfWarp + i);
      static_assert(kOfWarp == 4, "lanes 16 and 8 further lie in other blocks");
      total[warp][0] = (of[0] + of[2]) + (of[1] + of[3]);
      norm::butterfly<kChains / 2>(total[warp]);
    }
    static_assert(kMostWarps == 4);
    if (share_.ranks() == kOfWarp) return total[0][0];
    if (share_.ranks() == 2 * kOfWarp) return total[0][0] + total[1][0];
    return (total[0][0] + total[2][0]) + (total[1][0] + total[3][0]);
  }

  const BandShare<Element>& share_;
  Shared& shared_;
  const int row_, chain_;
};

// What a tile of neighbouring columns has for codes wherever they lie.
template <class Config>
struct TileCodes : TileWriter<Config> {
  using TileWriter<Config>::transpose_bytes;
};

// A team's tile: half of its columns are those of one panel, half those of the next.
template <class Config, bool centred>
class BandTile {
  using Element = typename Config::Element;
  using Scaling = typename Config::Scaling;
  using Scale = typename Scaler<Config>::Scale;
  using Stored = typename Config::Stored;
  using Shared = BandShared<Config>;
  static constexpr Stored kPadding = Scaling::kExponents ? 127 : 1;
  static constexpr int kPanelLanes = kPanelColumns / kLaneColumns;
  static constexpr int kPieces = Config::kPieces;

 public:
  __device__ __forceinline__ BandTile(const QuantizeArguments& in, const BandShare<Element>& share,
                                      Shared& shared, const Turn& turn)
      : in_(in),
        share_(share),
        shared_(shared),
        turn_(turn.number),
        team_(threadIdx.x / kThreads),
        panels_(shared.panels + turn.half(team_ / 2) + 2 * (team_ % 2)),
        warp_(threadIdx.x / 32 % kWarps),
        lane_(threadIdx.x % 32),
        panel_(2 * team_ + lane_ / kPanelLanes),
        column_(share.column(panel_) + lane_ % kPanelLanes * kLaneColumns),
        row_(share.band(turn.number) * kTileRows + warp_ * kWarpRows),
        rows_(max(0, min(kWarpRows, int32_t(in.rows) - row_))) {}

  // Both copies, and the largest magnitude. Called by the whole cluster.
  __device__ __forceinline__ float run() {
    load();
    wait_for_tile();
    begin_later(0);
    normalise();
    float amax = 0.0f;
    if constexpr (Scaling::kTensor) {
      if (in_.folded_amax != nullptr) amax = values_.amax();
      quantize_by_one_scale();
    } else {
      quantize_blocks();
    }
    begin_later(1);
    return amax;
  }

 private:
  // The place of one of the tile's panels takes that which is as many further as there are places.
  __device__ __forceinline__ void begin_later(int i) const {
    const bool second = team_ >= kTeams / 2;
    share_.begin(panels_[i], turn_ + 1 + second, 2 * team_ + i + (second ? -Turn::kHalf : Turn::kHalf));
  }
  // Where codes of columns meet: the second panel is not needed any more, and its place not yet.
  __device__ __forceinline__ uint8_t* stage() const {
    static_assert(sizeof(Panel) == kTileColumns * Config::kLineBytes);
    return reinterpret_cast<uint8_t*>(panels_[1]);
  }
  __device__ __forceinline__ void wait_for_tile() const { __barrier_sync_count(1 + team_, kThreads); }

  __device__ __forceinline__ void load() {
    const auto* const from = reinterpret_cast<const uint2*>(
        panels_[lane_ / kPanelLanes][warp_ * kWarpRows]) + lane_ % kPanelLanes;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const uint2 loaded = from[r * kPanelLanes];
      values_.pairs[r][0] = loaded.x;
      values_.pairs[r][1] = loaded.y;
    }
  }

  // As the norm's kernel does, and stores it. What is not there is zeros.
  __device__ __forceinline__ void normalise() {
    const NormArguments& norm = share_.norm;
    const bool in_columns = column_ < int(norm.columns);
    float gamma[kLaneColumns], bias[kLaneColumns];
    load_four(in_columns ? norm.weight : nullptr, gamma);
    if constexpr (centred) load_four(in_columns ? norm.bias : nullptr, bias);
    const float added = norm.weight == nullptr || norm.zero_centered ? 1.0f : 0.0f;
#pragma unroll
    for (float& each : gamma) each += added;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float rstd = shared_.rstd[warp_ * kWarpRows + r];
      const float mean = centred ? shared_.mean[warp_ * kWarpRows + r] : 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2];
        row::widen(values_.pairs[r][i], pair, Element());
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          pair[c] = (pair[c] - mean) * rstd * gamma[2 * i + c];
          if constexpr (centred) pair[c] += bias[2 * i + c];
        }
        values_.pairs[r][i] = round_pair(pair[0], pair[1], Element());
      }
    }
    const int count = in_columns ? rows_ : 0;
    if (count == kWarpRows) return;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (r >= count) values_.pairs[r][0] = values_.pairs[r][1] = 0;
    }
  }

  __device__ __forceinline__ void load_four(const void* from, float (&to)[kLaneColumns]) const {
    uint2 pairs{0, 0};
    if (from != nullptr) {
      pairs = __ldg(reinterpret_cast<const uint2*>(static_cast<const Element*>(from) + column_));
    }
    row::widen(pairs.x, to, Element());
    row::widen(pairs.y, to + 2, Element());
  }

  // ---- one scale for all: codes are the same in both copies

  __device__ __forceinline__ void quantize_by_one_scale() {
    const float factor = in_.scale[0];
    uint32_t codes[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) codes[r] = encode_row(r, factor);
    if (in_.columnwise.data != nullptr) {
      uint32_t words[kLaneColumns][Config::kRunWords];
      TileCodes<Config>::transpose_bytes(codes, words);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) put(words[c], c);
    }
    if (in_.rowwise.data != nullptr) store_rows([&](int r) { return codes[r]; });
    wait_for_tile();
    if (in_.columnwise.data != nullptr) copy_columns();
    wait_for_tile();
  }

  // ---- a scale for 128 elements along each direction: half of a row's lies in the next block

  __device__ __forceinline__ void quantize_blocks() {
    const bool rowwise = in_.rowwise.data != nullptr;
    const Scaler<Config> scaler(in_);
    const uint32_t rows = here(uint32_t(warp_ * kWarpRows / 2 + lane_ % kPanelLanes / 2));  // as in `add_up`
    uint32_t* const row_amax = &shared_.row_amax[panel_][rows];
    if (rowwise) {
      const RowAmaxes<Element, kPanelLanes> amaxes(values_);
      if (lane_ % 2 == 0) *row_amax = amaxes.pairs[0];
      arrive_at_cluster();
    }
    if (in_.columnwise.data != nullptr) quantize_columns(scaler);
    wait_for_tile();
    if (rowwise) {
      wait_for_cluster();
      quantize_rows(scaler, maximum<Element>(*row_amax, *of_rank(row_amax, share_.rank() ^ 1)));
    }
  }

  // Lanes that share a row's scale make those of different rows; `amaxes` are of two rows.
  __device__ __forceinline__ void quantize_rows(const Scaler<Config>& scaler, uint32_t amaxes) {
    const Scale scale = scaler(widen<Element>(amaxes, lane_ % 2));
    store_row_scale(row_ + lane_ % kPanelLanes, scale.stored);
    store_rows([&](int r) { return encode_row(r, __shfl_sync(kAll, scale.factor, r, kPanelLanes)); });
  }

  __device__ __forceinline__ void store_row_scale(int32_t row, Stored stored) const {
    if (share_.rank() % 2 != 0 || column_ >= int(in_.columns)) return;
    const int32_t block = column_ / kTileColumns, across = tiles_across(in_.columns);
    auto* const scales = static_cast<Stored*>(in_.rowwise.scale);
    const bool there = row < int32_t(in_.rows);
    if (in_.token_pitch != 0) {
      if (row < int32_t(in_.token_pitch)) scales[block * in_.token_pitch + row] = there ? stored : kPadding;
    } else if (there) {
      scales[int64_t(row) * across + block] = stored;
    }
  }

  // Each warp makes the scales of 16 columns: the division is what costs.
  __device__ __forceinline__ void quantize_columns(const Scaler<Config>& scaler) {
    auto& of_warps = shared_.column_amax[team_];
    of_warps[warp_][lane_] = make_uint2(values_.column_pair_amax(0), values_.column_pair_amax(1));
    wait_for_tile();
    const int column = warp_ * 16 + lane_ % 16;
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      amax = maximum<Element>(amax, reinterpret_cast<const uint32_t*>(of_warps[w])[column / 2]);
    }
    const Scale scale = scaler(widen<Element>(amax, column % 2));
    if (lane_ < 16) {
      shared_.factors[team_][column] = scale.factor;
      shared_.stored[team_][column] = scale.stored;
    }
    wait_for_tile();
    const float4 factors = *reinterpret_cast<const float4*>(&shared_.factors[team_][lane_ * kLaneColumns]);
    put_column(0, factors.x);
    put_column(1, factors.y);
    put_column(2, factors.z);
    put_column(3, factors.w);
    if (warp_ == 0) store_column_scales();
    wait_for_tile();
    copy_columns();
  }

  __device__ __forceinline__ void put_column(int c, float factor) {
    float scaled[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) scaled[r] = values_.at(r, c) * factor;
    uint32_t words[Config::kRunWords];
    encode_values<Config>(words, scaled, nullptr);
    put(words, c);
  }

  // By the tile's first warp, whose first row is the band's.
  __device__ __forceinline__ void store_column_scales() const {
    if (rows_ == 0 || column_ >= int(in_.columns)) return;
    const float* const from = &shared_.stored[team_][lane_ * kLaneColumns];
    Stored* const to = static_cast<Stored*>(in_.columnwise.scale) + int64_t(row_ / kTileRows) * in_.columns + column_;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) to[c] = Stored(from[c]);
  }

  // ---- codes

  __device__ __forceinline__ uint32_t encode_row(int r, float factor) const {
    float scaled[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) scaled[c] = values_.at(r, c) * factor;
    uint32_t word;
    encode_values<Config>(&word, scaled, nullptr);
    return word;
  }

  static constexpr int kAtOnce = 4;  // rows that are encoded: more take registers

  // Columns past the last one are zeros, and fill the pitch.
  template <class WordOf>
  __device__ __forceinline__ void store_rows(WordOf word_of) const {
    const int count = column_ < (int(in_.columns) + kPitch - 1) / kPitch * kPitch ? rows_ : 0;
    const uint32_t pitch = uint32_t(in_.rowwise.pitch);
    uint8_t* to = opaque(static_cast<uint8_t*>(in_.rowwise.data) + int64_t(row_) * pitch + column_);
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

  // The place of a piece of 16 bytes of a column: neither side has bank conflicts.
  __device__ __forceinline__ static int staged(int column, int piece) {
    return column * Config::kLineBytes + (piece ^ (column / kLaneColumns % kPieces)) * 16;
  }

  // 16 rows of one of the lane's columns.
  __device__ __forceinline__ void put(const uint32_t (&words)[Config::kRunWords], int c) const {
    *reinterpret_cast<uint4*>(stage() + staged(lane_ * kLaneColumns + c, warp_)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }

  // Lines of the band, as far as the copy has places for them.
  __device__ __forceinline__ void copy_columns() const {
    constexpr int kStep = kThreads / kPieces, kOfPanel = kPanelColumns / kStep;
    const int thread = threadIdx.x % kThreads, piece = thread % kPieces, first = thread / kPieces;
    const int64_t pitch = in_.columnwise.pitch;
    const int32_t place = share_.band(turn_) * kTileRows + piece * kWarpRows;
    if (place >= pitch) return;
    uint8_t* const lines = static_cast<uint8_t*>(in_.columnwise.data) + place;
    uint4 pieces[kTileColumns / kStep];
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      pieces[i] = *reinterpret_cast<const uint4*>(stage() + staged(first + i * kStep, piece));
    }
#pragma unroll
    for (int i = 0; i < kTileColumns / kStep; ++i) {
      const int column = share_.column(2 * team_ + i / kOfPanel) + i % kOfPanel * kStep + first;
      if (column < int(in_.columns)) *reinterpret_cast<uint4*>(lines + column * pitch) = pieces[i];
    }
  }

  const QuantizeArguments& in_;
  const BandShare<Element>& share_;
  Shared& shared_;
  const int32_t turn_;
  const int team_;
  Panel* const panels_;  // the tile's two
  const int warp_, lane_, panel_;
  const int32_t column_, row_;  // the lane's first ones
  const int rows_;              // that are there
  Values<Element> values_;
};

// What one scale for all leaves beside codes.
template <class Config>
__device__ __forceinline__ void leave_scale(const QuantizeArguments& in) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  for (void* const scale : {in.rowwise.scale, in.columnwise.scale}) {
    if (scale != nullptr) *static_cast<float*>(scale) = 1.0f / in.scale[0];
  }
}

template <class Shared>
__device__ __forceinline__ void fold_amax(float* to, float amax, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  amax = warp_amax(amax);
  if (lane == 0) shared.warp_amax[warp] = amax;
  __syncthreads();
  static_assert(kTeams * kWarps == 32);
  if (warp != 0) return;
  amax = warp_amax(shared.warp_amax[lane]);
  if (lane == 0) raise(to, amax);
}

template <class Config, bool centred>
static __global__ void __launch_bounds__(kBandThreads, 1)
    norm_quantize_band_kernel(const __grid_constant__ QuantizeArguments in,
                              const __grid_constant__ NormArguments norm, int32_t log_ranks, int32_t bands) {
  using Element = typename Config::Element;
  extern __shared__ uint4 shared[];
  auto& own = *reinterpret_cast<BandShared<Config>*>(shared);
  const BandShare<Element> share{norm, log_ranks, bands};
  const int team = threadIdx.x / kThreads;
  wait_for_previous_kernel();
  // Copies of a team are in groups of a panel: those of its tile, and of the next turn where there is place.
  Turn turn;
  const bool ahead = team >= kTeams / 2;
#pragma unroll 1
  for (int i = 0; i < (ahead ? 4 : 2); ++i) {
    const int panel = 2 * team + i % 2 - (i < 2 ? 0 : Turn::kHalf);
    share.begin(own.panels[i < 2 ? panel : kPanels + panel], i / 2, panel);
  }
  let_next_kernel_start();
  if constexpr (Config::Scaling::kTensor) leave_scale<Config>(in);
  BandStatistics<Element, centred, BandShared<Config>> statistics(share, own);
  float amax = 0.0f;
#pragma unroll 1
  for (; share.has(turn.number); turn = turn.next()) {
    wait_for_own_copies(ahead ? 2 : 0);
    __syncthreads();
    statistics.find(turn);
    amax = fmaxf(amax, BandTile<Config, centred>(in, share, own, turn).run());
  }
  wait_for_own_copies(0);
  if (Config::Scaling::kTensor && in.folded_amax != nullptr) fold_amax(in.folded_amax, amax, own);
  arrive_at_cluster();  // none leaves while another one reads its sums
  wait_for_cluster();
}

// How a band kernel is launched on what a device has.
template <class Config>
struct BandLaunch {
  using Kernel = void (*)(QuantizeArguments, NormArguments, int32_t, int32_t);
  Kernel kernel;
  Grid grid;  // of one cluster
  int resident = 0;

  explicit BandLaunch(const NormArguments& norm)
      : kernel(norm.kind == NormKind::layer ? &norm_quantize_band_kernel<Config, true>
                                            : &norm_quantize_band_kernel<Config, false>) {
    static ResidentClusters of_layers, of_others;
    grid.cluster = panel_ranks(norm.columns);
    grid.blocks = dim3(unsigned(grid.cluster));
    grid.threads = kBandThreads;
    static_assert(sizeof(BandShared<Config>) == kBandBytes);
    grid.shared_bytes = kBandBytes;
    if (grid.cluster == 0 || grid.shared_bytes > cta_shared_memory()) return;
    resident = (norm.kind == NormKind::layer ? of_layers : of_others).of(kernel, grid);
  }
};

// A norm whose rows stay in shared memory between their statistics and their codes.
template <class Config>
struct BandSource {
  NormArguments norm;
  BandLaunch<Config> launch;
};

template <class Config>
bool fits_bands(const NormQuantizeArguments& in) {
  const QuantizeArguments& out = in.step.quantize;
  const bool one = out.group_sizes == nullptr && out.groups == 1;
  const bool scaled = !Config::Scaling::kTensor || in.step.due != nullptr || out.scale != nullptr;
  return in.quantizes && in.norm.rows > 0 && one && scaled && in.step.sums == nullptr;
}

}  // namespace quantizing

template <class Config>
static Status launch_quantize(const QuantizeArguments& in, Stream& stream,
                              const quantizing::BandSource<Config>& source) {
  using namespace quantizing;
  if (Status status = check_quantize<Config>(in); !status.ok()) return status;
  const RowGroups groups{nullptr, int32_t(in.rows), 1};
  const int32_t bands = row_tiles(groups, work_space<Config>(in));
  Grid grid = source.launch.grid;
  grid.blocks = dim3(unsigned(std::min(bands, source.launch.resident) * grid.cluster));
  return launch_kernel("cudaLaunchKernelEx(norm_quantize_band)", source.launch.kernel, grid, stream, in,
                       source.norm, grid.cluster, bands);
}

// Rows in the shared memory of clusters where they fit, else as other architectures have it.
template <class Config>
static Status launch_norm_quantize_in_clusters(const NormQuantizeArguments& in, Stream& stream) {
  using namespace quantizing;
  if constexpr (kInPanels<Config>) {
    const BandSource<Config> source{in.norm, BandLaunch<Config>(in.norm)};
    if (fits_bands<Config>(in) && source.launch.resident > 0) {
      QuantizeStepArguments step = in.step;
      settle_wanted(step);
      if constexpr (!Config::Scaling::kTensor) {
        return launch_quantize<Config>(step.quantize, stream, source);
      } else {
        return step.due != nullptr ? quantize_delayed<Config>(step, stream, source)
                                   : quantize_scaled<Config>(step, stream, source);
      }
    }
  }
  return launch_norm_quantize<Config>(in, stream);
}

}  // namespace fusegen
