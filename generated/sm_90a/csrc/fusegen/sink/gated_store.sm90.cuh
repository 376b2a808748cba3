// Gated results into global memory by TMA: a warp has the same columns of both halves of a row,
// half a tile apart, and stores what an expression makes of them. The halves go to memory, too,
// where somebody asks for that.
//
// All take buffers of one ring, one behind the other. Halves are rounded once, before it is known
// whether anybody asks: see sink/aux_store.sm90.cuh.
#pragma once

#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/gated.cuh"
#include "fusegen/sink/tma_store.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// The sink of one warp, which has `Values` of every tile.
template <class Result, class Values, int Buffers, class Change>
struct GatedStore {
  static constexpr int kColumns = kGatedColumns<Values::kColumns>;  // of a part
  static constexpr int kParts = Values::kColumns / 2 / kColumns;    // of a strip, of a half
  static_assert(kParts * kColumns * 2 == Values::kColumns);
  using Chunk = WriteChunk<Result, kColumns>;
  using Part = Fragment<kColumns>;

  TmaStore<Result, Write::rows, Buffers> out;
  Change change;
  const float* row_values;          // [tokens]
  const CUtensorMap* aux;           // [2], a half each; nullptr: nobody asks
  float values[Values::kStrips][2];  // of the lane's two rows in every strip of a tile

  // Before the contraction, which hides how long they take. Rows past the group's end are never
  // stored, so they may have its last token's; those that no group has need none.
  __device__ void start(const Tile& tile, Place place) {
    if (!Change::kOfRows || tile.k == 0) return;
    const int32_t first = tile.row + place.row + int32_t(out.lane / 4);
#pragma unroll
    for (int i = 0; i < 2 * Values::kStrips; ++i) {
      const int32_t row = first + i / 2 * Values::kStripStep + i % 2 * 8;
      values[i / 2][i % 2] = __ldg(row_values + tile.begin + min(row, tile.tokens - 1));
    }
  }

  // Of strip `strip` of the tile.
  __device__ void put(const Part& first, const Part& second, const Tile& tile, Place place,
                      int strip) {
    auto words = Chunk::round(first);
    const auto beside = Chunk::round(second);
    if (aux != nullptr) {
      write(&aux[0], words, tile, place);
      write(&aux[1], beside, tile, place);
    }
    const auto change_of = change.begin(tile);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      words[i] = change_of(words[i], beside[i], values[strip][i % 2]);
    }
    write(out.map, words, tile, place);
  }

  __device__ void drain() { out.drain(); }

 private:
  __device__ void write(const CUtensorMap* to, const typename Chunk::Rounded& words,
                        const Tile& tile, Place place) {
    out.send(to, tile, place, [&](uint32_t buffer) {
      Chunk::write(words, out.lane, buffer, Keep());
    });
  }
};

// All of a warp's fragment that the tile and the gated result have, whose `columns` a tile has half
// as many of as before; `row` is the first one's. Visitors see either half where it stands in the
// row before. What a tile computes of columns past the first half is dropped.
template <class Values, class Visitors, class Sink>
__device__ void store_halves(const Values& fragment, Visitors& visitors, Sink& sink,
                             const Tile& tile, int32_t row, int32_t columns) {
  constexpr int kWidth = Sink::kColumns, kParts = Sink::kParts;
#pragma unroll
  for (int strip = 0; strip < Values::kStrips; ++strip) {
    const int32_t at_row = row + strip * Values::kStripStep;
    if (at_row >= tile.rows) return;
#pragma unroll
    for (int index = 0; index < kParts; ++index) {
      const Place at{at_row, tile.column / 2 + index * kWidth};
      if (at.column >= columns) break;
      const auto first = fragment.template part<kWidth>(strip, index);
      const auto second = fragment.template part<kWidth>(strip, kParts + index);
      visitors.visit(first, tile, at);
      visitors.visit(second, tile, Place{at_row, columns + at.column});
      sink.put(first, second, tile, at, strip);
    }
  }
}

}  // namespace fusegen
