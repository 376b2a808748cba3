// A math warpgroup's view of the ring of stages.
#pragma once

#include <cstdint>

#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"

namespace fusegen {

template <class T>
struct StageReader {
  uint64_t a, b;  // descriptors of this warpgroup's operands in stage 0
  const StageBarriers<T::kStages>& barriers;
  uint32_t lane;
  Cursor<T::kStages> at;

  // Of a warpgroup whose rows of a tile begin with `first_row`.
  __device__ StageReader(const uint8_t* stages, const StageBarriers<T::kStages>& barriers,
                         int32_t first_row, uint32_t lane)
      : a(operand_descriptor<T::kMajorA, T::kTileK>(stages) + first_row / kMmaRows * kRowStep),
        b(operand_descriptor<T::kMajorB, T::kTileK>(stages + T::kBytesA)),
        barriers(barriers),
        lane(lane) {}

  __device__ uint64_t stage_offset() const { return at.slot * (T::kStageBytes / 16); }

  // MMAs read by the asynchronous proxy, as TMA writes; other copies do not write by it.
  __device__ void wait() const {
    barriers.full[at.slot].wait(at.phase);
    if constexpr (T::kGather != Gather::none) fence_async_shared();
  }

  __device__ void release(uint32_t slot) const {
    barriers.template release<T::kCluster>(slot, lane);
  }

  // A warpgroup without rows of its own still takes part in every stage's handshake.
  __device__ void skip(int32_t k) {
    for (; k > 0; k -= T::kTileK) {
      wait();
      __syncwarp();
      release(at.slot);
      at.advance();
    }
  }

  // Stages of another warpgroup's tile.
  __device__ void pass_over(int32_t k) { at.advance(blocks(k, T::kTileK)); }
};

}  // namespace fusegen
