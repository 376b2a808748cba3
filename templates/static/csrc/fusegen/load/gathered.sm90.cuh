// An operand whose rows are gathered, from global memory into the ring of stages.
//
// TMA copies boxes of neighbouring rows, and the rows of tokens lie apart. Two warps copy them by
// cp.async instead, 16 bytes a lane, to where TMA would have written them (the 128-byte swizzle).
// Nobody waits for the copies: a stage's barrier counts each of these threads when what it copied has
// landed. Readers are on the asynchronous proxy, writers are not: see StageReader.
//
// Lines are rows of a box, 128 bytes: the tile's rows where those are tokens, whose places are looked
// up once a tile, or the tokens of a stage, whose slots are looked up a stage ahead. Eight lanes copy
// the eighths of every eighth line; each looks up one of their lines for the others.
//
// A stage of a tile with 128 columns takes 512 cycles to multiply, and so long may its 32 copies take.
#pragma once

#include <cstdint>

#include "fusegen/common/divisor.h"
#include "fusegen/common/rows.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/async.mma.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A matrix of 16-bit elements, [tokens / choices, columns], and the slot of each row.
struct GatheredRows {
  const uint8_t* from;
  const int32_t* row_slot;
  uint32_t slots;
  uint32_t columns;
  Divisor choices;

  // Of a row that is there; what is no slot is beyond all slots.
  __device__ uint32_t slot(int32_t row) const { return uint32_t(__ldg(row_slot + row)); }

  // Where the row of a slot begins, in units of 16 bytes, or no place.
  __device__ uint32_t place(uint32_t slot) const {
    return slot < slots ? choices.quotient(slot) * (columns / kRowAlignment) : kNoPlace;
  }

  __device__ static bool has(uint32_t place) { return place != kNoPlace; }

  static constexpr uint32_t kNoPlace = 0xffffffffu;
};

// What lies 16 `place` bytes behind an address: one instruction, which stays where it stands.
__device__ inline const uint8_t* behind(const uint8_t* address, uint32_t place) {
  const uint8_t* found;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(found) : "r"(place), "l"(address));
  return found;
}

// Counts this thread at a barrier once all that it copied so far has landed.
__device__ inline void arrive_when_copied(CopyBarrier& barrier) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(&barrier);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

template <class T>
class GatherLoader {
  static constexpr bool kOfA = T::kGather == Gather::a;
  static constexpr Major kMajor = kOfA ? T::kMajorA : T::kMajorB;
  static constexpr int kBoxes = kOfA ? T::kBoxesA : T::kBoxesB;
  static constexpr int kBoxBytes = kOfA ? T::kBoxBytesA : T::kBoxBytesB;
  static constexpr int kBegins = kOfA ? 0 : T::kBytesA;  // in a stage
  static constexpr int kBoxLines = 64;
  static constexpr int kBoxColumns = kSwizzleBytes / T::kElementBytes;
  static constexpr int kChunks = kSwizzleBytes / 16;  // of a line
  static constexpr int kLineStep = T::kGatherThreads / kChunks;
  static constexpr int kCopies = kBoxLines / kLineStep;  // of a lane, of a box
  static constexpr int kAtOnce = 4;  // addresses in registers
  // Stages that are filled by one address of each line: where there are many, for one is faster to give
  // back than two.
  static constexpr int kTogether = T::kStages >= 6 ? 2 : 1;
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr uint32_t kNoSlot = 0xffffffffu;
  static_assert(kBoxBytes == kBoxLines * kSwizzleBytes && (kMajor == Major::MN || kOfA));
  static_assert(kLineStep == 8, "the swizzle is the same in all of a lane's lines");
  static_assert(kCopies == kChunks, "each of eight lanes looks up one of their lines");

 public:
  // `thread` of those that gather.
  __device__ GatherLoader(const GatheredRows& in, uint8_t* shared, uint32_t thread)
      : in_(in), lane_(thread % 32) {
    const uint32_t line = thread / kChunks;
    own_line_ = int32_t(chunk() * kLineStep + line);
    to_ = cute::cast_smem_ptr_to_uint(shared) + kBegins + line * kSwizzleBytes +
          (chunk() ^ line) * 16;
  }

  // Every stage of every tile; the threads of the warps that gather.
  __device__ void run(StageBarriers<T::kStages>& barriers, const TileRing& ring) const {
    Cursor<T::kStages> at;
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      if (tile.k == 0) continue;
      if constexpr (kMajor == Major::K) {
        copy_rows(tile, barriers, at);
      } else {
        copy_tokens(tile, barriers, at);
      }
    }
  }

 private:
  __device__ uint32_t chunk() const { return lane_ % kChunks; }

  __device__ static int existing(int32_t extent, int32_t width) {
    return extent <= 0 ? 0 : min(int(blocks(extent, width)), kBoxes);
  }

  // This lane's chunk, from a column of the matrix on.
  __device__ const uint8_t* at_column(int32_t column) const {
    return in_.from + (uint64_t(uint32_t(column)) * T::kElementBytes + chunk() * 16);
  }

  // The tile's rows are tokens; every stage has other columns of them.
  // Rows past the last one come out as rows that nobody stores.
  __device__ void copy_rows(const Tile& tile, StageBarriers<T::kStages>& barriers,
                            Cursor<T::kStages>& at) const {
    const int boxes = existing(tile.rows, kBoxLines);
    uint32_t places[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box >= boxes) continue;
      const int32_t line = min(own_line_ + box * kBoxLines, tile.rows - 1);
      places[box] = in_.place(in_.slot(tile.begin + tile.row + line));
    }
    const uint8_t* column = at_column(0);
    for (int32_t k = 0; k < tile.k; k += kTogether * T::kTileK) {
      const int32_t columns = tile.k - k;
      const int stages = min(kTogether, int(blocks(columns, T::kTileK)));
      const Cursor<T::kStages> first = at;
      Cursor<T::kStages> last = at;
      if (stages == 2) last.advance();
      barriers.empty[first.slot].wait(first.phase ^ 1);
      if (stages == 2) barriers.empty[last.slot].wait(last.phase ^ 1);
      const uint32_t to = to_ + first.slot * T::kStageBytes;
      const uint32_t apart = (last.slot - first.slot) * T::kStageBytes;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (box >= boxes) continue;
        copy_lines<kTogether>(to + box * kBoxBytes, apart, places[box], column, columns);
      }
      arrive_when_copied(barriers.full[first.slot]);
      if (stages == 2) arrive_when_copied(barriers.full[last.slot]);
      at = last;
      at.advance();
      column += kTogether * kSwizzleBytes;
    }
  }

  // Every stage has other tokens, the same columns of them.
  __device__ void copy_tokens(const Tile& tile, StageBarriers<T::kStages>& barriers,
                              Cursor<T::kStages>& at) const {
    const int32_t first = kOfA ? tile.row : tile.column;
    const int32_t columns = int32_t(in_.columns) - first;
    const uint8_t* const column = at_column(first);
    uint32_t slot = slot_of(tile, 0);
    for (int32_t k = 0; k < tile.k; k += T::kTileK) {
      const uint32_t place = in_.place(slot);
      slot = slot_of(tile, k + T::kTileK);
      barriers.empty[at.slot].wait(at.phase ^ 1);
      copy_lines<kBoxes>(to_ + at.slot * T::kStageBytes, kBoxBytes, place, column, columns);
      arrive_when_copied(barriers.full[at.slot]);
      at.advance();
    }
  }

  // Of a stage's tokens the one that this lane looks up.
  __device__ uint32_t slot_of(const Tile& tile, int32_t k) const {
    const int32_t token = k + own_line_;
    return token < tile.tokens ? in_.slot(tile.begin + token) : kNoSlot;
  }

  // `Boxes` with the same lines and neighbouring columns, of which `columns` exist: the first goes to
  // `to`, each of the others `apart` bytes behind the one before. `place` of the line that this lane
  // looked up.
  template <int Boxes>
  __device__ void copy_lines(uint32_t to, uint32_t apart, uint32_t place, const uint8_t* column,
                             int32_t columns) const {
    if (columns >= Boxes * kBoxColumns && __all_sync(kAll, in_.has(place))) {
      copy_all<Boxes>(to, apart, place, column);
    } else {
      copy_some<Boxes>(to, apart, place, column, columns);
    }
  }

  // The place of the i-th line that this lane copies.
  __device__ uint32_t place_of(int i, uint32_t place) const {
    return __shfl_sync(kAll, place, i, kChunks);
  }

  // Addresses come before the copies: one in the register of another would wait until the copy from
  // there has read it, which takes longer than all else that a copy needs.
  template <int Boxes>
  __device__ void copy_all(uint32_t to, uint32_t apart, uint32_t place,
                           const uint8_t* column) const {
#pragma unroll
    for (int begun = 0; begun < kCopies; begun += kAtOnce) {
      const uint8_t* from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) from[i] = behind(column, place_of(begun + i, place));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int box = 0; box < Boxes; ++box) {
          copy_async(to + box * apart + (begun + i) * kLineStep * kSwizzleBytes,
                     from[i] + box * kSwizzleBytes, 16);
        }
      }
    }
  }

  // What exists.
  template <int Boxes>
  __device__ void copy_some(uint32_t to, uint32_t apart, uint32_t place, const uint8_t* column,
                            int32_t columns) const {
    const int boxes = min(Boxes, int(blocks(max(columns, 0), kBoxColumns)));
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t own = place_of(i, place);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        const bool has =
            in_.has(own) && box * kBoxColumns + int32_t(chunk()) * kRowAlignment < columns;
        copy_async(to + box * apart + i * kLineStep * kSwizzleBytes,
                   has ? behind(column, own) + box * kSwizzleBytes : in_.from, has ? 16 : 0);
      }
    }
  }

  const GatheredRows& in_;
  uint32_t lane_;
  int32_t own_line_;  // of a box, which this lane looks up
  uint32_t to_;       // where its first copy goes in the first stage
};

}  // namespace fusegen
