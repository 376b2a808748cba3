// The contraction of one tile by one warpgroup, in sums of 128 products that are added up in fp32
// registers.
//
// The MMAs of 128 columns and one stage (128 of the contraction) run into a set of accumulators of
// their own, which is added to the total: while a warpgroup adds, the other one's MMAs run. Parts
// of 128 columns let a tile be 256 wide with 128 registers of total and 64 of partial sums, and
// give each part one scale of a weight.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/mainloop/promotion.sm90.cuh"
#include "fusegen/mainloop/stages.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"

namespace fusegen {

// The warpgroup holds 64 rows of the tile. `Promotion` says how partial sums join the total.
template <class T, class Promotion>
struct SplitSums : StageReader<T> {
  using Base = StageReader<T>;
  using Base::a, Base::b, Base::at, Base::release, Base::stage_offset;
  using Mma = typename T::Mma;
  using Sums = Accumulators<1, T::kTileN>;
  using Partial = Accumulators<1, kScaleBlock>;
  using Arguments = typename Promotion::Arguments;
  static constexpr int kSteps = T::kTileK / T::kMmaK;
  static constexpr int kParts = T::kTileN / kScaleBlock;
  static constexpr uint32_t kPartStep = kScaleBlock * kSwizzleBytes / 16;  // of B's descriptor
  static_assert(T::kWaves == 1 && T::kTileN % kScaleBlock == 0 && kSteps == 4);
  static_assert(T::kTileK == kScaleBlock);

  Promotion promotion;

  // `row` is this thread's first in a tile.
  __device__ SplitSums(const Base& reader, Arguments arguments, const uint8_t* shared,
                       uint32_t row)
      : Base(reader), promotion(arguments, shared + T::kExtraAt, row, reader.lane) {}

  // Of at least one stage; `columns` of the result remain from the tile's first on.
  template <class Issued>
  __device__ void run(Sums& total, const Tile& tile, int32_t, int32_t columns, Issued) {
    if (kParts > 1 && columns <= kScaleBlock) {
      run_parts<1>(total, tile);
    } else {
      run_parts<kParts>(total, tile);
    }
  }

 private:
  template <int Parts>
  __device__ void run_parts(Sums& total, const Tile& tile) {
    auto sum = promotion.template begin<Parts>(tile);
    Partial partial;
    int left = blocks(tile.k, T::kMmaK);
    add_stage<Parts, true>(total, partial, sum, left);
    while ((left -= kSteps) > 0) add_stage<Parts, false>(total, partial, sum, left);
  }

  // The first stage's sums are the total; where they have no scale, the MMAs write them there.
  // A stage whose scales are read while adding is released after that, others as soon as the last
  // MMA has ended.
  template <int Parts, bool First, class Sum>
  __device__ void add_stage(Sums& total, Partial& partial, Sum& sum, int steps) {
    this->wait();
    sum.enter_stage(at.slot * Promotion::kStageBytes);
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      auto& whole = total.template part<kScaleBlock>(part);
      constexpr bool kInPlace = First && !Sum::kScales;
      multiply_part(kInPlace ? whole : partial, part, steps);
      if (part == Parts - 1 && !Sum::kReadsStage) release_stage();
      if constexpr (!kInPlace) sum.template add<First>(whole.values[0], partial.values[0], part);
    }
    if (Sum::kReadsStage) release_stage();
    at.advance();
  }

  // Where the contraction runs over tokens, the last stage gets no more MMA steps than it has
  // tokens for. Adding up is the same code for all, lest registers spill.
  __device__ void multiply_part(Partial& d, int part, int steps) {
    if (T::kKind != Gemm::wgrad || steps >= kSteps) {
      multiply_part<kSteps>(d, part);
    } else if (steps == 1) {
      multiply_part<1>(d, part);
    } else if (steps == 2) {
      multiply_part<2>(d, part);
    } else {
      multiply_part<3>(d, part);
    }
  }

  // The MMAs of one part of one stage, finished on return.
  template <int Steps>
  __device__ void multiply_part(Partial& d, int part) {
    d.fence();
    fence_mmas();
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
      const uint64_t offset = stage_offset() + step * kKStep<Major::K>;
      Mma::template step<1, kScaleBlock>(d, a + offset, b + offset + part * kPartStep,
                                         step == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
    commit_mmas();
    wait_for_mmas<0>();
    d.fence();
  }

  // All lanes have read their scales before one of them gives the stage away.
  __device__ void release_stage() {
    if (Promotion::kStageBytes > 0) __syncwarp();
    release(at.slot);
  }
};

}  // namespace fusegen
