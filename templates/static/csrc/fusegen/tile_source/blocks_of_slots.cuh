// Which row blocks of a group a walk hands out: all, or those of some tokens.
//
// Where tokens arrive one rank after the other, row blocks that are of tokens that are there are computed
// before the others. Rows stay where they are, and so does every tile: each result has the same bits.
#pragma once

#include <cstdint>

#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// All of them.
struct AllBlocks {
  static constexpr bool kAll = true;

  __device__ void find(uint32_t, uint32_t) {}
  __device__ uint32_t rows(uint32_t tokens) const { return tokens; }
  __device__ void place(Tile&, int) const {}
};

// Slots [first, end), or, of as many as there are, those that are not; of none of them, all.
struct SlotRange {
  uint32_t first = 0, end = 0;
  bool inside = false;
};

// Row blocks whose rows are all of slots in a range, or those that have another row. Slots of a group's
// rows ascend; what is no slot is behind all. Each lane has a group of its own.
template <int TileM>
class BlocksOfSlots {
 public:
  static constexpr bool kAll = false;

  __device__ BlocksOfSlots(const int32_t* row_slot, const SlotRange& range)
      : row_slot_(row_slot), range_(range) {}

  // In the lane's group: its first row, and how many it has.
  __device__ void find(uint32_t begin, uint32_t tokens) {
    first_ = within_ = 0;
    if (range_.first == range_.end) return;
    const uint32_t end = rows_before(range_.end, begin, tokens);
    first_ = blocks(rows_before(range_.first, begin, tokens), TileM);
    const uint32_t last = end == tokens ? blocks(tokens, TileM) : end / TileM;
    within_ = last > first_ ? last - first_ : 0;
  }

  // As many as the blocks have that are handed out of the lane's group; there may be fewer.
  __device__ uint32_t rows(uint32_t tokens) const {
    return (range_.inside ? within_ : blocks(tokens, TileM) - within_) * TileM;
  }

  // Where the tile lies whose place among those of its group is known; all lanes, which know whose
  // group it is.
  __device__ void place(Tile& tile, int owner) const {
    const int32_t first = int32_t(__shfl_sync(0xffffffffu, first_, owner)) * TileM;
    const int32_t within = int32_t(__shfl_sync(0xffffffffu, within_, owner)) * TileM;
    if (tile.rows <= 0) {  // only helps: behind all
      tile.row = int32_t(blocks(tile.tokens, TileM)) * TileM;
    } else {
      tile.row += range_.inside ? first : tile.row >= first ? within : 0;
    }
    tile.rows = tile.tokens - tile.row;
  }

 private:
  // Rows of the group that are of slots before one. A walk begins with this search, of whose steps
  // each waits for memory: four of 8 ways find a row among 4096, what a step reads is under way together.
  __device__ uint32_t rows_before(uint32_t slot, uint32_t begin, uint32_t tokens) const {
    constexpr uint32_t kWays = 8;
    const int32_t* const slots = row_slot_ + begin;
    uint32_t low = 0, high = tokens;
    while (low < high) {
      const uint32_t first = low, count = high - low;
#pragma unroll
      for (uint32_t i = 1; i < kWays; ++i) {  // of neighbours, one is before and one not
        const uint32_t row = first + uint32_t(uint64_t(count) * i / kWays);
        const bool is_before = uint32_t(__ldg(slots + row)) < slot;
        low = is_before ? row + 1 : low;
        high = is_before ? high : min(high, row);
      }
    }
    return low;
  }

  const int32_t* row_slot_;
  const SlotRange& range_;  // parameters of the kernel: no registers hold them
  uint32_t first_ = 0, within_ = 0;  // of the range, in blocks
};

}  // namespace fusegen
