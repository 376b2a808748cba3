// Stages through mma.sync into the sums of one warp: see mainloop/running_sums.mma.cuh.
//
// Every warp multiplies its own part of the tile. Operands are bytes: a step is 32 of them along the
// contraction, which ldmatrix reads as 16 of 16 bits. Those of the next step come into registers
// while this one's MMAs run, across the end of a stage, too; stages are kStages - 1 steps ahead, and
// where a tile has none left those of the next tile come, so that they are on their way while
// results are stored. Each step has one barrier: before it all have read the stage that is filled
// after it.
#pragma once

#include <cstdint>

#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/load/cp_async.mma.cuh"
#include "fusegen/load/stage.cuh"
#include "fusegen/mainloop/warp_mma.mma.cuh"

namespace fusegen {

// Four 8x8 matrices; lane 8 i + r gives the address of row r of matrix i.
template <bool Transposed>
__device__ void load_matrices(uint32_t (&out)[4], uint32_t address) {
  if constexpr (Transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
}

enum class Operand { A, B };

// One warp's part of an operand's stage: `Blocks` of 16 rows of A or columns of B.
template <Operand operand, class Layout, int Blocks>
class WarpOperand {
  static constexpr bool kTransposed = Layout::kMajor == StageMajor::MN;
  static constexpr uint32_t kSixteenLines = 16 * Layout::kLineBytes;
  static_assert((Blocks & (Blocks - 1)) == 0, "steps across are exclusive ors");
  static_assert(!kTransposed || Layout::kBits == 16, "ldmatrix transposes 16 bits");

 public:
  // `first`: the warp's first row or column in the tile. MMAs take the four matrices of 16 by 32
  // bytes as registers in this order: of A the two of K's first half first, of B the two of one half
  // of the columns.
  __device__ WarpOperand(uint32_t first, uint32_t lane) {
    const uint32_t extent = first + (operand == Operand::A ? lane / 8 % 2 : lane / 16) * 8;
    const uint32_t half = operand == Operand::A ? lane / 16 : lane / 8 % 2;  // of K
    at_ = kTransposed ? Layout::offset(half * 8 + lane % 8, extent / 8)
                      : Layout::offset(extent + lane % 8, half);
  }

  // Registers of step `step`. The permutation repeats every eight lines, and a step across
  // changes bits of the chunk that `first` leaves zero.
  __device__ void load(uint32_t (&out)[Blocks][4], uint32_t stage, int step) const {
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      const uint32_t lines = (kTransposed ? step : block) * kSixteenLines;
      const uint32_t across = (kTransposed ? block : step) * kStepBytes;
      load_matrices<kTransposed>(out[block], stage + (at_ ^ across) + lines);
    }
  }

 private:
  uint32_t at_;  // the lane's address in a stage, of step 0 and block 0
};

template <Gemm kind, class Config, class T>
class MmaMainloop {
 public:
  static constexpr int kRowBlocks = T::kWarpRows / 16;
  using Accumulators = float[kRowBlocks][T::kWarpColumns / 2];  // as a Fragment has them

  // `row` and `column`: the warp's first in the tile.
  __device__ MmaMainloop(uint32_t stages, uint32_t row, uint32_t column, uint32_t lane)
      : stages_(stages), a_(row, lane), b_(column, lane), scales_(row, column, lane) {}

  // The contraction of a tile, of whose first kStages - 1 stages copies are under way, and the
  // copies of as many of the tile after it. A warp that `multiplies` nothing takes part in those.
  template <class Sums>
  __device__ void run(Sums& sums, const Tile& tile, const Tile& next,
                      CopyRing<kind, Config, T>& copies, bool multiplies) {
    if (multiplies) {
      run<true>(sums, tile, next, copies);
    } else {
      run<false>(sums, tile, next, copies);
    }
  }

 private:
  static constexpr int kColumnPairs = T::kWarpColumns / 16;  // of 8 columns each
  static constexpr int kSteps = T::kDepthBytes / kStepBytes;
  static constexpr int kAhead = T::kStages - 1;

  using Scales = typename T::Scales;
  using ScaleWords = typename Scales::template Words<T>;

  struct Registers {
    uint32_t a[kRowBlocks][4], b[kColumnPairs][4];
    typename ScaleWords::Registers scales;
  };

  template <bool Multiplies, class Sums>
  __device__ void run(Sums& sums, const Tile& tile, const Tile& next,
                      CopyRing<kind, Config, T>& copies) {
    const int32_t count = (tile.k + Config::tile_k - 1) / Config::tile_k;
    const int32_t own = max(count - kAhead, 0);  // steps that have copies of this tile left
    scales_.start();
    if (count > 0) enter_stage<Multiplies>();
    int32_t stage = 0;
    for (; stage < own; ++stage) {
      multiply_stage<Multiplies, false>(sums, true, [&] { copies.copy(); });
    }
    copies.enter(next);
    for (; stage < count; ++stage) {
      multiply_stage<Multiplies, true>(sums, stage + 1 < count, [&] { copies.copy_if_any(); });
    }
    for (int32_t missing = count; missing < kAhead; ++missing) copies.copy_if_any();
  }

  // Waits for the copies of the next stage, and for all to have read the one before it.
  template <bool Multiplies>
  __device__ void enter_stage() {
    wait_for_copies<kAhead - 1>();
    __syncthreads();
    if constexpr (Multiplies) load(0);
  }

  __device__ void load(int step) {
    a_.load(registers_[step % 2].a, stages_ + at_, step);
    b_.load(registers_[step % 2].b, stages_ + at_ + T::A::kBytes, step);
    scales_.load(registers_[step % 2].scales, stages_ + at_ + T::kScalesAt, step);
  }

  // One stage, whose first step is in registers; on return that of the next stage is, if any.
  template <bool Multiplies, bool MayEnd, class Sums, class Copy>
  __device__ void multiply_stage(Sums& sums, bool goes_on, Copy copy) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < kSteps - 1) {
        if constexpr (Multiplies) load(step + 1);
      } else {
        at_ = at_ == (T::kStages - 1) * T::kStageBytes ? 0 : at_ + T::kStageBytes;
        scales_.advance();
        if (!MayEnd || goes_on) enter_stage<Multiplies>();
      }
      if (step == 0) copy();
      if constexpr (Multiplies) multiply_step(sums.accumulators(), registers_[step % 2]);
    }
    if constexpr (Multiplies) sums.end_stage(MayEnd && !goes_on);
  }

  // Column blocks go to and fro, so that neighbouring MMAs share registers.
  __device__ void multiply_step(Accumulators& sums, const Registers& in) {
#pragma unroll
    for (int row = 0; row < kRowBlocks; ++row) {
#pragma unroll
      for (int i = 0; i < kColumnPairs * 2; ++i) {
        const int column = row % 2 == 0 ? i : kColumnPairs * 2 - 1 - i;
        Scales::template multiply_add<typename T::Mma>(&sums[row][column * 4], in.a[row],
                                                       &in.b[column / 2][column % 2 * 2], in.scales, row,
                                                       column);
      }
    }
  }

  uint32_t stages_;
  uint32_t at_ = 0;  // the stage that is read
  WarpOperand<Operand::A, typename T::A, kRowBlocks> a_;
  WarpOperand<Operand::B, typename T::B, kColumnPairs> b_;
  ScaleWords scales_;
  Registers registers_[2];
};

}  // namespace fusegen
