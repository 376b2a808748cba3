// The contraction of tiles by one warp, in accumulators of tensor memory; of a pair of CTAs by that of
// the first one, while the second one's tells it what has come.
#pragma once


#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/mainloop/tcgen05.sm100.cuh"
#include "fusegen/mainloop/umma.sm100.cuh"
#include "fusegen/quantize/scale_atoms.cuh"
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

// What the second CTA of a pair tells the first one: that its part of a stage has come.
template <int Stages, int Ctas>
struct PeerBarriers {
  Barrier loaded[Stages];

  __device__ void init() {
    for (Barrier& barrier : loaded) barrier.init(1);
  }
  __device__ void wait(uint32_t slot, uint32_t phase) const { loaded[slot].wait(phase); }
};
template <int Stages>
struct PeerBarriers<Stages, 1> {
  __device__ void init() {}
  __device__ void wait(uint32_t, uint32_t) const {}
};

// Waits for stages and for an accumulator that nobody reads, asks for MMAs, and has the tensor core
// say that they are done: at the stage, which is loaded again, and at the accumulator.
template <class T>
struct TensorSums {
  static constexpr int kSteps = T::kTileK / T::kMmaK;
  static constexpr int kCtas = T::kCluster;
  static constexpr uint32_t kInstruction =
      instruction_descriptor<T::kMma, typename T::A, typename T::B>(
          kCtas * T::kTileM, T::kTileN, T::kMajorA, T::kMajorB);

  const StageBarriers<T::kStages>& stages;
  const typename T::Peer& peer;
  const typename T::Sums& sums;
  uint64_t a, b, scales;  // of stage 0
  uint32_t memory;
  Cursor<T::kStages> at;
  Cursor<T::kSums> sum;

  __device__ TensorSums(const uint8_t* shared, const StageBarriers<T::kStages>& stages,
                        const typename T::Peer& peer, const typename T::Sums& sums,
                        uint32_t memory)
      : stages(stages),
        peer(peer),
        sums(sums),
        a(matrix_descriptor<T::kMajorA, T::kTileK>(shared_address(shared))),
        b(matrix_descriptor<T::kMajorB, T::kTileK>(
            shared_address(shared + T::kBytesA))),
        scales(atom_descriptor(shared_address(shared + T::kExtraAt))),
        memory(memory) {}

  // All tiles; those without a contraction take no accumulator.
  __device__ void run(const TileRing& ring) {
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      if (tile.k == 0) continue;
      sums.empty[sum.slot].wait(sum.phase ^ 1);
      tcgen05::fence_after_sync();
      multiply(tile);
      tcgen05::commit<kCtas>(sums.full[sum.slot]);
      sum.advance();
    }
  }

  // In the place of that, in the second CTA of a pair.
  __device__ void tell_first(const TileRing& ring) {
    Cursor<TileRing::kSlots> record;
    for (Tile tile = ring.read(record); tile.group >= 0; tile = ring.read(record)) {
      for (int32_t k = 0; k < tile.k; k += T::kTileK, at.advance()) {
        stages.full[at.slot].wait(at.phase);
        if (threadIdx.x % 32 == 0) peer.loaded[at.slot].arrive(0u);
      }
    }
  }

 private:
  // The last stage gets no more MMAs than there is contraction left: what follows a group's tokens
  // in a transposed copy is another group's.
  __device__ void multiply(const Tile& tile) {
    const uint32_t d = memory + sums.column(sum.slot);
    for (int32_t k = 0; k < tile.k; k += T::kTileK, at.advance()) {
      stages.full[at.slot].wait(at.phase);
      peer.wait(at.slot, at.phase);
      tcgen05::fence_after_sync();
      copy_scales();
      const int steps = int(blocks(tile.k - k, T::kMmaK));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step < steps) multiply(d, uint32_t(step), k > 0 || step > 0);
      }
      tcgen05::commit<kCtas>(stages.empty[at.slot]);
    }
  }

  __device__ void multiply(uint32_t d, uint32_t step, bool add) const {
    const uint64_t stage = at.slot * (T::kStageBytes / 16);
    const uint64_t of_a = a + stage + step * kUmmaStep<T::kMajorA, T::kBits>;
    const uint64_t of_b = b + stage + step * kUmmaStep<T::kMajorB, T::kBits>;
    if constexpr (T::kAtoms == 0) {
      tcgen05::multiply<T::kMma, kCtas>(d, of_a, of_b, kInstruction, add);
    } else {
      constexpr uint32_t kBytes = T::kAtoms == 1;  // of one atom, or an atom to each step
      const uint32_t atom = kBytes ? 0 : step;
      tcgen05::multiply<T::kMma, kCtas>(
          d, of_a, of_b, kInstruction | scale_byte(kBytes * step), add,
          scales_of_a() + atom * T::kAtomColumns,
          scales_of_b() + atom * (T::kAtomColumns * T::kAtomsOfB));
    }
  }

  // The scales of a stage, behind the accumulators: MMAs of the stage before have read theirs when
  // the copies are made, because both go through one pipe (PTX ISA, "tcgen05 memory consistency").
  __device__ uint32_t scales_of_a() const { return memory + T::kSums * T::kTileN; }
  __device__ uint32_t scales_of_b() const {
    return scales_of_a() + T::kAtoms * T::kAtomColumns;
  }
  __device__ void copy_scales() const {
    constexpr int kCount = T::kAtoms * (1 + T::kAtomsOfB);
    const uint64_t stage = scales + at.slot * (T::kScaleBytes / 16);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      tcgen05::copy_atom<kCtas>(scales_of_a() + i * T::kAtomColumns, stage + i * (kAtomBytes / 16));
    }
  }
};

}  // namespace fusegen
