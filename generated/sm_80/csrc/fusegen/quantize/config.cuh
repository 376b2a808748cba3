// What a quantise kernel is instantiated with, and how it makes scales from amaxes and codes from
// values.
#pragma once

#include "fusegen/quantize/quantize.h"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/quantize/tile.cuh"

namespace fusegen {

// How a scale follows from the largest magnitude of the elements that share it.
enum class Rule {
  ratio,  // the format's largest value over it
  mx,     // a power of two
  nvfp4,  // below a scale of the group
};

inline constexpr int kWhole = 0;  // extent of a block that spans the whole dimension

// Which elements share a scale in the rowwise copy: `rows` x `columns`; the columnwise copy swaps
// the two. A warp has whole blocks of 16 rows, a tile of 128: see quantize/tile.cuh.
template <int rows, int columns, class StoredFormat_, Rule rule>
struct Scaling {
  using StoredFormat = StoredFormat_;
  using Stored = std::conditional_t<std::is_same_v<StoredFormat, float>, float, uint8_t>;
  static constexpr Rule kRule = rule;
  static constexpr bool kExponents = std::is_same_v<StoredFormat, E8M0>;
  static constexpr bool kTensor = rows == kWhole && columns == kWhole;
  static constexpr bool kRow = rows == 1 && columns == kWhole;
  static constexpr bool kSquare = !kTensor && rows == columns;
  static constexpr int kRows = rows;      // 0: all
  static constexpr int kBlock = columns;  // 0: not in blocks
  // Scales of a row's blocks may lie token by token: see QuantizeArguments::token_pitch.
  static constexpr bool kTokenMajor =
      rows == 1 && columns != kWhole && std::is_same_v<StoredFormat, float>;
  // Elements of a byte where matrix instructions read scales; a longer block has several, all alike.
  static constexpr int kAtomBlock = kExponents ? 32 : 16;

  static constexpr int kLeastBlock = 16, kMostBlock = 128;
  static_assert(kLeastBlock == quantizing::kWarpRows, "a warp would have several blocks of rows");
  static_assert(kMostBlock == kTileRows && kMostBlock == quantizing::kTileColumns,
                "a block would span tiles");
  static_assert(kTensor || rows == 1 || rows == columns, "a tensor, rows, or square blocks");
  static_assert(columns == kWhole || (columns >= kLeastBlock && columns <= kMostBlock &&
                                      (columns & (columns - 1)) == 0),
                "columns: a power of two that a tile has whole blocks of");
  static_assert(rule == Rule::ratio ? std::is_same_v<StoredFormat, float> || kExponents
                                    : std::is_same_v<StoredFormat, std::conditional_t<rule == Rule::mx, E8M0, E4M3>>,
                "what each rule stores its scales in");
  static_assert(columns != kWhole || rule == Rule::ratio, "other rules are of blocks");
};

// Of codes that are decoded as they are, whatever their scales.
struct Unscaled {
  static constexpr int kRows = kWhole;
  static constexpr int kBlock = kWhole;
  static constexpr bool kSquare = false;
};

// Whether a unit states the blocks that share a scale as `Scaling` has them.
template <class Stated, class Scaling>
constexpr bool agrees_scaling() {
  static_assert(Stated::scale_rows == Scaling::kRows, "scale_rows: unit against Scaling");
  static_assert(Stated::scale_columns == Scaling::kBlock, "scale_columns: unit against Scaling");
  return true;
}

namespace quantizing {

template <class Element>
inline constexpr float kElementMax = 65504.0f;
template <>
inline constexpr float kElementMax<__nv_bfloat16> = 3.38953138925153547590e+38f;

}  // namespace quantizing

template <class Element_, class Format_, class Scaling_, bool stochastic = false,
          bool transformed = false, bool atoms = false>
struct QuantizeConfig {
  using Element = Element_;
  using Format = Format_;
  using Scaling = Scaling_;
  static constexpr bool kStochastic = stochastic;  // round to E2M1 with random bits
  static constexpr bool kHadamard = transformed;   // transform the columnwise copy first
  static constexpr bool kAtoms = atoms;            // scales lie as scale_atoms.cuh says
  static constexpr int kBlock = Scaling::kBlock;   // 0: not in blocks
  static constexpr bool kSquare = Scaling::kSquare;
  static constexpr Rule kRule = Scaling::kRule;
  using Stored = typename Scaling::Stored;

  static constexpr int kLineBytes = kTileRows * Format::kBits / 8;  // a column of the tile
  static constexpr int kPieces = kLineBytes / 16;
  static constexpr int kRunWords = 16 * Format::kBits / 32;  // 16 codes
  // Whether both copies are encoded side by side, so that each value is read once. Random bytes of
  // columns would take the registers, and a transform changes the values.
  static constexpr bool kTogether =
      kRule == Rule::nvfp4 && kBlock == quantizing::kWarpRows && !kSquare && !stochastic && !transformed;
  // Registers of what follows a block's loads decide; more blocks on an SM overlap more of them.
  // Below sm_90 magnitudes have registers of their own, twice where rows and columns compare them at
  // a time; but memory is slower, too: 1.55 TB/s at 700 ns ask each SM of an A100 for 10 KiB of
  // loads, and a block has 32. Of blocks that round stochastically, which take 40 KiB of shared
  // memory, SMs of 8.6 and 8.9 have room for two. Places in atoms take registers beside what NVFP4 has.
  static constexpr bool kTwo = kTogether || (stochastic && kLeastArchitecture > 800);
  static constexpr int kOfAtoms = stochastic || transformed ? 2 : kRule == Rule::nvfp4 ? 3 : 4;
  static constexpr int kBlocksPerSm =
      kLeastArchitecture >= 900 ? (atoms ? kOfAtoms : stochastic ? 3 : 4) : (kTwo ? 2 : 3);
  // Tiles beside each other that a block makes, one after the other: they share what comes before the
  // first, which is long where blocks have a scale of the group above them. Otherwise a longer tail
  // would cost more, but for the recipe whose tiles take longest where groups are many.
  static constexpr int kColumnTiles =
      kRule == Rule::nvfp4 ? 4 : Scaling::kTokenMajor && kBlock == kTileRows ? 2 : 1;

  static_assert(!stochastic || Format::kBits == 4, "stochastic rounding is defined for E2M1");
  static_assert(!transformed || (kRule == Rule::nvfp4 && kBlock == fusegen::kHadamard && !kSquare),
                "transforms span 16 rows, a block");
  static_assert(kRule != Rule::nvfp4 || Format::kBits == 4);
  static_assert(!atoms || (sizeof(Stored) == 1 && kBlock > 0 && kBlock % Scaling::kAtomBlock == 0 &&
                           kBlock <= kAtomBlocks * Scaling::kAtomBlock),
                "matrix instructions read a byte for 32 elements, or for 16, and four of them at a time");
};

namespace quantizing {

inline constexpr int kBlockCodes = 128;  // of E4M3, not negative

// Amax -> the factor that encodes and the scale that is stored.
template <class Config>
struct Scaler {
  using Stored = typename Config::Stored;
  struct Scale {
    float factor;
    Stored stored;
  };

  float epsilon;
  bool power_of_two, round_down;
  float tensor_scale = 1.0f;       // nvfp4
  const float* factors = nullptr;  // of block codes, in shared memory

  __device__ explicit Scaler(const QuantizeArguments& in)
      : epsilon(in.epsilon), power_of_two(in.power_of_two), round_down(in.round_down) {}

  __device__ __forceinline__ Scale operator()(float amax) const {
    if constexpr (Config::kRule == Rule::mx) {
      using Format = typename Config::Format;
      const uint32_t code = round_down ? e8m0_round_down<Format>(amax)
                                       : e8m0_round_up(amax * (1.0f / Format::kMax));
      return {e8m0_inverse(code), Stored(code)};
    } else if constexpr (Config::kRule == Rule::nvfp4) {
      const uint32_t code = nvfp4_block_code(amax, tensor_scale);
      return {factors[code], Stored(code)};
    } else {
      constexpr float kLargest =
          Config::kBlock == 0 ? kFloatMax : kElementMax<typename Config::Element>;
      const float factor =
          scale_from_amax(amax, Config::Format::kMax, epsilon, kLargest, power_of_two);
      if constexpr (Config::Scaling::kExponents) {
        return {factor, Stored(e8m0_of_inverse(factor))};
      } else {
        return {factor, 1.0f / factor};
      }
    }
  }
};

// Random bytes of runs of 16 elements; stream 0 rowwise, 1 columnwise.
template <int Count>
__device__ __forceinline__ void draw(PhiloxWords (&drawn)[Count], const int64_t* rng_state,
                                     const int64_t (&runs)[Count], uint32_t stream) {
  const int64_t seed = rng_state[0], offset = rng_state[1];
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    drawn[i] = {{uint32_t(runs[i]), uint32_t(runs[i] >> 32), stream, uint32_t(offset)}};
  }
  philox(drawn, uint32_t(seed), uint32_t(seed >> 32));
}

// Codes of scaled values, the first in the lowest bits; of E2M1 those of magnitudes, without signs.
// `random` where rounding is stochastic: bytes for the values, in order.
template <class Config, int Count>
__device__ __forceinline__ void encode_values(uint32_t* words, const float (&scaled)[Count],
                                              [[maybe_unused]] const uint32_t* random) {
  using Format = typename Config::Format;
  constexpr int kWordCodes = 32 / Format::kBits;
#pragma unroll
  for (int i = 0; i < Count; i += kWordCodes) {
    uint32_t& word = words[i / kWordCodes];
    if constexpr (Config::kStochastic) {
      word = stochastic_e2m1(scaled + i, random + i / 4);
    } else if constexpr (Format::kBits == 4) {
      word = nearest_e2m1<8>(scaled + i);
    } else {
      word = encode_pair<Format>(scaled[i], scaled[i + 1]) |
             encode_pair<Format>(scaled[i + 2], scaled[i + 3]) << 16;
    }
  }
}

// The space that tiles walk: groups start where they do in the columnwise copy, or at whole blocks of
// rows where there are such and if those are longer. Of matrices it has the padding of the longest
// copy, too.
template <class Config>
__host__ __device__ inline Space work_space(const QuantizeArguments& in) {
  const bool spans_rows = Config::kSquare || in.columnwise.data != nullptr;
  const int64_t block = spans_rows ? Config::kBlock : 1;
  const int64_t align = in.row_align > block ? in.row_align : block;
  if (in.group_sizes != nullptr) return {int32_t(align), 0};
  int64_t length = in.rows;
  if (in.columnwise.data != nullptr) {
    const int64_t places = in.columnwise.pitch * 8 / Config::Format::kBits;
    length = places > length ? places : length;
  }
  if (in.rowwise.data != nullptr && in.token_pitch > length) length = in.token_pitch;
  return {int32_t(align), int32_t(length)};
}

// The requirement that a copy breaks, or nullptr.
template <class Config>
const char* broken_requirement(const QuantizeArguments& in) {
  const bool ragged = in.group_sizes != nullptr;
  const bool rowwise = in.rowwise.data != nullptr, columnwise = in.columnwise.data != nullptr;
  constexpr bool kTensor = Config::Scaling::kTensor, kRow = Config::Scaling::kRow;
  if (in.row_align < kTileRows / Config::kPieces || in.row_align > kTileRows ||
      (in.row_align & (in.row_align - 1)) != 0) {
    return "row_align: a power of two from one piece of 16 bytes to 128 rows";
  }
  if (in.rows + kTileRows * (in.groups + 2) > 0x7FFFFFFF) return "padded rows < 2^31";
  if (in.token_pitch < 0 || in.token_pitch > 0x7FFFFFFF) return "token_pitch < 2^31";
  for (const int64_t pitch : {in.rowwise.pitch, in.columnwise.pitch}) {
    if (pitch % kPitch != 0 || pitch < 0 || pitch >= 1 << 30) return "pitch % 16 = 0, below 2^30";
  }
  const bool one_scale = Config::kSquare || kTensor;
  if (!one_scale && rowwise && in.rowwise.scale == nullptr) return "rowwise.scale";
  if (!one_scale && columnwise && in.columnwise.scale == nullptr) return "columnwise.scale";
  if (kRow && rowwise && in.rowwise.amax == nullptr) return "row: rowwise.amax";
  if (kRow && columnwise && in.columnwise.amax == nullptr) return "row: columnwise.amax";
  if (kTensor && in.scale == nullptr && in.rowwise.amax == nullptr &&
      in.columnwise.amax == nullptr) {
    return "tensor: a scale or an amax";
  }
  if (Config::kStochastic && in.rng_state == nullptr) return "stochastic: rng_state";
  if (in.token_pitch != 0 && !Config::Scaling::kTokenMajor) return "token_pitch = 0";
  if (Config::kAtoms && in.row_align != kAtomRows) return "row_align = 128 where scales lie in atoms";
  if (Config::Scaling::kExponents && Config::kRule == Rule::ratio && !in.power_of_two) {
    return "power_of_two where scales are exponents";
  }
  if (in.token_pitch != 0 && !ragged && in.groups != 1) return "token_pitch = 0 for matrices";
  return nullptr;
}

}  // namespace quantizing

}  // namespace fusegen
