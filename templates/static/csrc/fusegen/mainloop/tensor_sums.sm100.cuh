// The contraction of tiles by one warp, in accumulators of tensor memory.
#pragma once

#include <cute/arch/util.hpp>

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/tcgen05.sm100.cuh"
#include "fusegen/mainloop/umma.sm100.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// The accumulators of a CTA: `full` once a tile's sums are complete, `empty` once they are read.
template <int Count, int Columns>
struct SumBarriers {
  Barrier full[Count], empty[Count];

  __device__ void init(uint32_t reading_warps) {
    for (int i = 0; i < Count; ++i) {
      full[i].init(1);
      empty[i].init(reading_warps);
    }
  }

  // Column of the first sum of an accumulator.
  __device__ static uint32_t column(uint32_t slot) { return slot * Columns; }
};

// Waits for stages and for an accumulator that nobody reads, asks for MMAs, and has the tensor core
// say that they are done: at the stage, which is loaded again, and at the accumulator.
template <class T>
struct TensorSums {
  static constexpr int kSteps = T::kTileK / T::kMmaK;
  static constexpr uint32_t kInstruction = instruction_descriptor<typename T::A, typename T::B>(
      T::kTileM, T::kTileN, T::kMajorA, T::kMajorB);

  const StageBarriers<T::kStages>& stages;
  const typename T::Sums& sums;
  uint64_t a, b;  // of stage 0
  uint32_t memory;
  Cursor<T::kStages> at;
  Cursor<T::kSums> sum;

  __device__ TensorSums(const uint8_t* shared, const StageBarriers<T::kStages>& stages,
                        const typename T::Sums& sums, uint32_t memory)
      : stages(stages),
        sums(sums),
        a(matrix_descriptor<T::kMajorA, T::kTileK>(cute::cast_smem_ptr_to_uint(shared))),
        b(matrix_descriptor<T::kMajorB, T::kTileK>(
            cute::cast_smem_ptr_to_uint(shared + T::kBytesA))),
        memory(memory) {}

  // All tiles; those without a contraction take no accumulator.
  __device__ void run(const TileRing& ring) {
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      if (tile.k == 0) continue;
      sums.empty[sum.slot].wait(sum.phase ^ 1);
      tcgen05::fence_after_sync();
      multiply(tile);
      tcgen05::commit(sums.full[sum.slot]);
      sum.advance();
    }
  }

 private:
  // Where the contraction runs over tokens, the last stage gets no more MMAs than it has tokens for.
  __device__ void multiply(const Tile& tile) {
    const uint32_t d = memory + sums.column(sum.slot);
    for (int32_t k = 0; k < tile.k; k += T::kTileK, at.advance()) {
      stages.full[at.slot].wait(at.phase);
      tcgen05::fence_after_sync();
      const uint64_t stage = at.slot * (T::kStageBytes / 16);
      const int steps = T::kKind == Gemm::wgrad ? int(blocks(tile.k - k, T::kMmaK)) : kSteps;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= steps) continue;
        tcgen05::multiply<T::kMma>(d, a + stage + step * kUmmaStep<T::kMajorA, T::kElementBytes>,
                                   b + stage + step * kUmmaStep<T::kMajorB, T::kElementBytes>,
                                   kInstruction, k > 0 || step > 0);
      }
      tcgen05::commit(stages.empty[at.slot]);
    }
  }
};

}  // namespace fusegen
