// Gated results into global memory by TMA as codes of a format of 8 bits, by a scale of each group
// that is known before; where somebody asks for them, the same codes by columns and the halves that
// they are of, too.
//
// What is encoded is rounded to the module's own type before, as it would be on its way through
// memory. Its largest magnitude joins the others of the group once a tile.
//
// All values of a tile are rounded first, and move up in their registers part by part: written out
// part by part the way from there to codes is longer than the cache of instructions, which takes
// three times as long as the contraction it should hide behind.
#pragma once

#include <array>
#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/quantize/math.cuh"
#include "fusegen/quantize/pairs.cuh"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/columnwise_codes.sm90.cuh"
#include "fusegen/sink/gated.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// An expression of halves, `Gated_`, whose value is stored in a `Format`.
template <class Gated_, class Format_>
struct GatedCodes : Gated_ {
  using Format = Format_;
};

__device__ inline void store_shared(uint32_t address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// What a kernel is told of the change and of the tensors around it.
template <class Change_>
struct GatedCodesEpilogue {
  using Change = Change_;

  Change change;
  const float* row_values = nullptr;  // [tokens], where the change is of them, too
  const float* scales = nullptr;      // [groups], that values are multiplied by
  float* inverses = nullptr;          // [groups], of the scales
  int32_t groups = 1;
  float* amaxes = nullptr;            // [groups], raised to those of values; nullptr: nobody asks
  ColumnwiseCodes columnwise = {};
  CUtensorMap codes = {};
  CUtensorMap aux[2] = {};  // a half each
  bool asked = false;       // for aux; it is no descriptor otherwise

  __device__ void prefetch() const {
    prefetch_descriptor(&codes);
    if (!asked) return;
    prefetch_descriptor(&aux[0]);
    prefetch_descriptor(&aux[1]);
  }
};

// The sink of one warp, which has `Values` of every tile of `Height` rows; called as GatedStore is.
template <class Result, class Values, int Height, int Buffers, class Epilogue>
struct GatedCodesStore {
  using Change = typename Epilogue::Change;
  using Format = typename Change::Format;
  static constexpr int kColumns = kGatedColumns<Values::kColumns>;
  static constexpr int kParts = Values::kColumns / 2 / kColumns;
  static_assert(kParts * kColumns * 2 == Values::kColumns && Format::kBits == 8);
  static_assert(Values::kStrips <= 2);
  using Chunk = WriteChunk<Result, kColumns>;
  using Part = typename Chunk::Rounded;
  using Codes = PartCodes<kColumns>;
  static constexpr int kWords = kColumns / 4;  // of a lane, of a part
  static constexpr int kAllWords = Values::kStrips * kParts * kWords;
  using Words = std::array<uint32_t, kAllWords>;

  const Epilogue& told;  // parameters of the kernel: no registers hold them
  TmaStore<Result, Write::rows, Buffers> out;
  int32_t columns;  // of the gated result
  float values[Values::kStrips][2] = {};  // of the lane's two rows in every strip of a tile
  float factor = 0.0f;
  int32_t group = -1;     // of the tile before
  uint32_t largest = 0;   // of a pair, of what the lane encoded of that

  // Before the contraction, which hides how long it takes. See GatedStore.
  __device__ void start(const Tile& tile, Place place) {
    raise_amax();
    group = tile.k == 0 ? -1 : tile.group;
    factor = 0.0f;
    if (tile.begin == 0 && tile.row + place.row == 0 && tile.column == 0) store_inverses();
    if (tile.k == 0) return;
    factor = __ldg(told.scales + tile.group);
    if (!Change::kOfRows) return;
    const int32_t first = tile.row + place.row + int32_t(out.lane / 4);
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t row = first + i / 2 * Values::kStripStep + i % 2 * 8;
      values[i / 2][i % 2] = __ldg(told.row_values + tile.begin + min(row, tile.tokens - 1));
    }
  }

  // As store_halves of sink/gated_store.sm90.cuh has it.
  template <class Visitors>
  __device__ void store(const Values& fragment, Visitors& visitors, const Tile& tile,
                        int32_t row) {
    if (row == 0) {
      const int32_t column = tile.column / 2, left = columns - column;
      told.columnwise.pad(tile, Height, out.lane, column, min(left, kParts * kColumns));
    }
    Words first, second;
    round(fragment, visitors, tile, row, first, second);
    const int32_t rows = told.columnwise.rows(tile);
#pragma unroll 1
    for (int index = 0; index < Values::kStrips * kParts; ++index) {
      const int strip = index / kParts;
      const Place at{row + strip * Values::kStripStep,
                     tile.column / 2 + index % kParts * kColumns};
      if (at.row >= rows) return;
      if (at.column < columns) put(first, second, tile, at, strip);
#pragma unroll
      for (int i = kWords; i < kAllWords; ++i) {
        first[i - kWords] = first[i];
        second[i - kWords] = second[i];
      }
    }
  }

  __device__ void drain() {
    raise_amax();
    out.drain();
  }

 private:
  // Of all groups, those without rows, too: by one warp, that of the first tile.
  __device__ void store_inverses() const {
    for (int32_t group = int32_t(out.lane); group < told.groups; group += 32) {
      const float inverse = __frcp_rn(__ldg(told.scales + group));
      told.inverses[group] = inverse;
      if (told.columnwise.data != nullptr) told.columnwise.inverses[group] = inverse;
    }
  }

  // Every part of both halves, once visitors have seen it.
  template <class Visitors>
  __device__ void round(const Values& fragment, Visitors& visitors, const Tile& tile, int32_t row,
                        Words& all_first, Words& all_second) const {
#pragma unroll
    for (int index = 0; index < Values::kStrips * kParts; ++index) {
      const int strip = index / kParts, part = index % kParts;
      const Place at{row + strip * Values::kStripStep, tile.column / 2 + part * kColumns};
      const auto first = fragment.template part<kColumns>(strip, part);
      const auto second = fragment.template part<kColumns>(strip, kParts + part);
      if (at.row < tile.rows && at.column < columns) {
        visitors.visit(first, tile, at);
        visitors.visit(second, tile, Place{at.row, columns + at.column});
      }
      const Part words = Chunk::round(first), beside = Chunk::round(second);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        all_first[index * kWords + i] = words[i];
        all_second[index * kWords + i] = beside[i];
      }
    }
  }

  // The first part of all words, in strip `strip` of the tile.
  __device__ void put(const Words& first, const Words& second, const Tile& tile, Place place,
                      int strip) {
    Part words, beside;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = first[i];
      beside[i] = second[i];
    }
    if (told.asked) {
      write(&told.aux[0], words, tile, place);
      write(&told.aux[1], beside, tile, place);
    }
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = strip == 0 ? values[0][i] : values[Values::kStrips - 1][i];
    }
    const auto change_of = told.change.begin(tile);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = change_of(words[i], beside[i], own[i % 2]);
    see(words, tile, place);
    const Codes codes = encode(words);
    out.send(&told.codes, tile, place, [&](uint32_t buffer) { write_rows(codes, buffer); });
    if (told.columnwise.data == nullptr || group < 0) return;
    if (out.lane == 0) wait_for_stores<Buffers - 1>();  // from the next buffer, as send() waits
    __syncwarp();
    told.columnwise.template store<kColumns>(codes, out.lane, out.ring.address(), tile, place,
                                             columns);
  }

  __device__ void write(const CUtensorMap* to, const Part& words,
                        const Tile& tile, Place place) {
    out.send(to, tile, place, [&](uint32_t buffer) {
      Chunk::write(words, out.lane, buffer, Keep());
    });
  }

  // Of rows and columns that there are.
  __device__ void see(const Part& words, const Tile& tile, Place place) {
    using quantizing::comparable;
    using quantizing::larger_magnitude;
    const int32_t row = tile.row + place.row + int32_t(out.lane / 4);
    const int32_t left = columns - place.column - int32_t(out.lane % 4) * 2;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const bool exists = row + i % 2 * 8 < tile.tokens && i / 2 * 8 < left;
      const uint32_t seen = exists ? words[i] : 0;
      largest = larger_magnitude<Result>(largest, comparable<Result>(seen));
    }
  }

  __device__ Codes encode(const Part& words) const {
    Codes codes;
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      const int first = i / 2 * 4 + i % 2;
      codes[i] = pair_of(words[first]) | pair_of(words[first + 2]) << 16;
    }
    return codes;
  }

  __device__ uint32_t pair_of(uint32_t word) const {
    using quantizing::widen_high;
    using quantizing::widen_low;
    return uint16_t(encode_pair<Format>(widen_low<Result>(word) * factor,
                                        widen_high<Result>(word) * factor));
  }

  // Codes of two neighbours at a time, in rows of as many bytes as there are columns.
  __device__ void write_rows(const Codes& codes, uint32_t buffer) const {
    const uint32_t own = buffer + out.lane / 4 * kColumns + out.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      const uint32_t to = own + i % 2 * 8 * kColumns + i / 2 * 16;
      store_shared(to, uint16_t(codes[i]));
      store_shared(to + 8, uint16_t(codes[i] >> 16));
    }
  }

  __device__ void raise_amax() {
    if (told.amaxes == nullptr || group < 0) return;
    const uint32_t pair = quantizing::amax_of<Result>(largest);
    const float own = fmaxf(quantizing::widen_low<Result>(pair), quantizing::widen_high<Result>(pair));
    const uint32_t amax = __reduce_max_sync(0xffffffffu, __float_as_uint(own));
    auto* const of_group = reinterpret_cast<unsigned*>(told.amaxes + group);
    if (out.lane == 0 && amax > 0) atomicMax(of_group, amax);  // numbers, which integers order alike
    largest = 0;
  }
};

// See sink/gated_store.sm90.cuh.
template <class Values, class Visitors, class Result, int Height, int Buffers, class Epilogue>
__device__ void store_halves(const Values& fragment, Visitors& visitors,
                             GatedCodesStore<Result, Values, Height, Buffers, Epilogue>& sink,
                             const Tile& tile, int32_t row, int32_t) {
  sink.store(fragment, visitors, tile, row);
}

}  // namespace fusegen
