// An operand whose rows are gathered, from global memory into the ring of stages.
//
// TMA copies boxes of neighbouring rows, and the rows of tokens lie apart. Two warps copy them by
// cp.async instead, 16 bytes a lane, to where TMA would have written them (the 128-byte swizzle).
// Nobody waits for the copies: a stage's barrier counts each lane when what it copied has landed.
// Readers are on the asynchronous proxy, writers are not: see StageReader.
//
// Lines are rows of a box, 128 bytes. Where the tile's rows are tokens their places are looked up once a
// tile, and each warp fills every second stage. Where a stage has tokens of its own their slots are
// looked up a stage ahead, and both warps fill it: contractions are short there, and what is looked up
// first is waited for. Eight lanes copy the eighths of a line; each looks up some of their lines for
// the others.
//
// The smallest tile takes 512 cycles to multiply a stage. So long may both warps take for its 1024
// copies and all around them.
#pragma once

#include <cstdint>

#include "fusegen/common/divisor.h"
#include "fusegen/common/rows.h"
#include "fusegen/gemm/gathered.h"
#include "fusegen/load/async.mma.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"
#include "fusegen/tile_source/blocks_of_slots.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A matrix of 16-bit elements, [tokens / choices, columns], and the slot of each row. Where rows are
// those of the result, of which of them.
struct GatheredRows {
  const uint8_t* from;
  const int32_t* row_slot;
  uint32_t slots;
  uint32_t columns;
  Divisor choices;
  SlotRange of = {};

  // Of a row that is there; what is no slot is beyond all slots.
  __device__ uint32_t slot(int32_t row) const { return uint32_t(__ldg(row_slot + row)); }

  // Where the row of a slot begins, in units of 16 bytes, or nowhere.
  __device__ uint32_t place(uint32_t slot) const {
    return slot < slots ? choices.quotient(slot) * (columns / kRowAlignment) : kNowhere;
  }

  static constexpr uint32_t kNowhere = 0xffffffffu;
};

// What lies 16 `place` bytes behind an address. It stays where it stands.
__device__ inline const uint8_t* behind(const uint8_t* address, uint32_t place) {
  const uint8_t* found;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(found) : "r"(place), "l"(address));
  return found;
}

// Counts this thread at a barrier once all that it copied so far has landed.
__device__ inline void arrive_when_copied(CopyBarrier& barrier) {
  const uint32_t address = shared_address(&barrier);
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
  static constexpr int kWarps = T::kGatherWarps;         // that fill a stage
  static constexpr int kLineStep = kWarps * 32 / kChunks;
  static constexpr int kCopies = kBoxLines / kLineStep;  // of a lane, of a box
  static constexpr int kLookups = kCopies / kChunks;     // of a lane, of a box
  static constexpr int kAtOnce = 4;                      // addresses in registers
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr uint32_t kNoSlot = 0xffffffffu;
  static_assert((kWarps == 1) == (kMajor == Major::K));
  static_assert(kBoxBytes == kBoxLines * kSwizzleBytes && (kMajor == Major::MN || kOfA));
  static_assert(kLineStep == 4 || kLineStep == 8, "the swizzle, see goes_to");

 public:
  // Of `warp`, the first or the second that gathers.
  __device__ GatherLoader(const GatheredRows& in, uint8_t* shared, uint32_t warp, uint32_t lane)
      : in_(in), warp_(warp), lane_(lane) {
    to_ = shared_address(shared) + kBegins + line() * kSwizzleBytes +
          (chunk() ^ line()) * 16;
  }

  // Every stage of every tile; all lanes.
  __device__ void run(StageBarriers<T::kStages>& barriers, const TileRing& ring) const {
    At at{{}, kWarps == 2 || warp_ == 0};
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
  // A stage, and whether this warp fills it.
  struct At {
    Cursor<T::kStages> stage;
    bool mine;

    __device__ void advance() {
      stage.advance();
      if (kWarps == 1) mine = !mine;
    }
  };
  using Own = uint32_t[kLookups];  // what this lane looked up of a box's lines

  __device__ uint32_t chunk() const { return lane_ % kChunks; }
  // The first of this lane's.
  __device__ uint32_t line() const { return lane_ / kChunks + (kWarps - 1) * warp_ * (32 / kChunks); }

  // The i-th line of a box that this lane looks up.
  __device__ int32_t own_line(int i) const {
    return int32_t(line() + (chunk() + i * kChunks) * kLineStep);
  }

  // This lane's chunk of the first token, from a column on.
  __device__ const uint8_t* at_column(int32_t column) const {
    return in_.from + (uint64_t(uint32_t(column)) * T::kElementBytes + chunk() * 16);
  }

  // The tile's rows are tokens; every stage has other columns of them. Rows past the last one come
  // out as rows that nobody stores.
  __device__ void copy_rows(const Tile& tile, StageBarriers<T::kStages>& barriers, At& at) const {
    const int boxes = boxes_in(tile.rows, kBoxLines, kBoxes);
    Own places[kBoxes];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box >= boxes) continue;
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
        const int32_t row = min(box * kBoxLines + own_line(i), tile.rows - 1);
        places[box][i] = in_.place(in_.slot(tile.begin + tile.row + row));
      }
    }
    const uint8_t* column = at_column(0);
    for (int32_t k = 0; k < tile.k; k += T::kTileK, column += kSwizzleBytes, at.advance()) {
      if (!at.mine) continue;
      barriers.empty[at.stage.slot].wait(at.stage.phase ^ 1);
      const uint32_t stage = to_ + at.stage.slot * T::kStageBytes;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (box >= boxes) continue;
        copy_lines<1>(stage + box * kBoxBytes, places[box], column, tile.k - k);
      }
      arrive_when_copied(barriers.full[at.stage.slot]);
    }
  }

  // Every stage has other tokens, the same columns of them.
  __device__ void copy_tokens(const Tile& tile, StageBarriers<T::kStages>& barriers, At& at) const {
    const int32_t first = kOfA ? tile.row : tile.column;
    const int32_t columns = int32_t(in_.columns) - first;
    const uint8_t* const column = at_column(first);
    Own slots;
    find_slots(tile, 0, slots);
    for (int32_t k = 0; k < tile.k; k += T::kTileK, at.advance()) {
      Own places;
#pragma unroll
      for (int i = 0; i < kLookups; ++i) places[i] = in_.place(slots[i]);
      find_slots(tile, k + T::kTileK, slots);
      barriers.empty[at.stage.slot].wait(at.stage.phase ^ 1);
      copy_lines<kBoxes>(to_ + at.stage.slot * T::kStageBytes, places, column, columns);
      arrive_when_copied(barriers.full[at.stage.slot]);
    }
  }

  // Those of a stage's tokens that this lane looks up.
  __device__ void find_slots(const Tile& tile, int32_t k, Own& slots) const {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int32_t token = k + own_line(i);
      slots[i] = token < tile.tokens ? in_.slot(tile.begin + token) : kNoSlot;
    }
  }

  // `Boxes` with the same lines and neighbouring columns, of which `columns` exist.
  template <int Boxes>
  __device__ void copy_lines(uint32_t to, const Own& places, const uint8_t* column,
                             int32_t columns) const {
    bool all = columns >= Boxes * kBoxColumns;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) all = all && places[i] != in_.kNowhere;
    if (__all_sync(kAll, all)) {
      copy_all<Boxes>(to, places, column);
    } else {
      copy_some<Boxes>(to, places, column, columns);
    }
  }

  // The place of the i-th line that this lane copies, as another one looked it up, and where it goes.
  __device__ static uint32_t place_of(int i, uint32_t looked_up) {
    return __shfl_sync(kAll, looked_up, i % kChunks, kChunks);
  }
  __device__ static uint32_t goes_to(int i, uint32_t to) {
    constexpr uint32_t kOther = kLineStep % 8 * 16;  // bit of every second line that permutes chunks
    return (i % 2 == 0 ? to : to ^ kOther) + i * kLineStep * kSwizzleBytes;
  }

  // Addresses come before the copies: one in the register of another would wait until the copy from
  // there has read it, which takes longer than all else that a copy needs.
  template <int Boxes>
  __device__ void copy_all(uint32_t to, const Own& places, const uint8_t* column) const {
#pragma unroll
    for (int begun = 0; begun < kCopies; begun += kAtOnce) {
      const uint8_t* from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        from[i] = behind(column, place_of(begun + i, places[begun / kChunks]));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int box = 0; box < Boxes; ++box) {
          copy_async(goes_to(begun + i, to) + box * kBoxBytes, from[i] + box * kSwizzleBytes, 16);
        }
      }
    }
  }

  // What exists.
  template <int Boxes>
  __device__ void copy_some(uint32_t to, const Own& places, const uint8_t* column,
                            int32_t columns) const {
    const int boxes = min(Boxes, int(blocks(max(columns, 0), kBoxColumns)));
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t place = place_of(i, i < kChunks ? places[0] : places[kLookups - 1]);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        const bool has =
            place != in_.kNowhere && box * kBoxColumns + int32_t(chunk()) * kRowAlignment < columns;
        copy_async(goes_to(i, to) + box * kBoxBytes,
                   has ? behind(column, place) + box * kSwizzleBytes : in_.from, has ? 16 : 0);
      }
    }
  }

  const GatheredRows& in_;
  uint32_t warp_, lane_;
  uint32_t to_;  // where its first copy goes in the first stage
};

// What the warps run that gather.
struct Gathered {
  const GatheredRows& rows;

  template <class T>
  __device__ typename T::Source source(const typename T::Walk& walk, const Control<T>& control) const {
    if constexpr (T::kKind == Gemm::wgrad) {
      return {walk, control.order};
    } else {
      return {walk, control.order, {rows.row_slot, rows.of}};
    }
  }

  template <class T, class Control>
  __device__ void run(uint8_t* shared, Control& control, uint32_t warp, uint32_t lane) const {
    GatherLoader<T>(rows, shared, warp, lane).run(control.stages, control.ring);
  }
};

}  // namespace fusegen
