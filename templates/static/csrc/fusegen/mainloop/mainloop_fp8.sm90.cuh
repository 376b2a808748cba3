// FP8 operands from global memory into stages (one thread), and from stages through the tensor
// cores into accumulators (one warpgroup).
//
// Fast accumulation is the mainloop of 16-bit operands. Split accumulation runs the MMAs of 128
// columns and one stage (128 of the contraction) into a set of its own and adds that to the total:
// while a warpgroup adds, the other one's MMAs run. Parts of 128 columns let a tile be 256 wide
// with 128 registers of total and 64 of partial sums, and give each part one scale of a weight.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/config_fp8.sm90.cuh"
#include "fusegen/mainloop/mainloop.sm90.cuh"
#include "fusegen/mainloop/promotion.sm90.cuh"

namespace fusegen {

template <Gemm kind>
__device__ BoxCoordinates fp8_coordinates_a(const Tile& tile, int32_t row, int32_t k) {
  if constexpr (kind == Gemm::wgrad) return {padded_begin(tile) + k, row, 0, 0};
  return {k, tile.begin + row, 0, 0};
}

template <Gemm kind>
__device__ BoxCoordinates fp8_coordinates_b(const Tile& tile, int32_t column, int32_t k) {
  if constexpr (kind == Gemm::wgrad) return {padded_begin(tile) + k, column, 0, 0};
  return {k, column, tile.group, 0};
}

// Block scales of one stage, for this CTA alone.
template <Gemm kind, class T>
__device__ void load_stage_scales(const BlockScales<kind>& scales, CopyBarrier& full,
                                  uint8_t* to, const Tile& tile, int32_t k) {
  const int32_t block = k / kScaleBlock;
  if constexpr (kind == Gemm::wgrad) {
    const int32_t at = first_scale_block(tile) + block;
    load_box<2>(&scales.a, full, to, {tile.row, at, 0, 0}, false);
    load_box<2>(&scales.b, full, to + T::InStage::kBytesA, {tile.column, at, 0, 0}, false);
  } else {
    load_box<2>(&scales.a, full, to, {padded_begin(tile) + tile.row, block, 0, 0}, false);
  }
}

// Loads every stage of every tile. One thread.
template <Gemm kind, Fp8Scaling scaling, class T, class Config>
__device__ void load_fp8_operands(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                  const Scales<kind, scaling>& scales, uint8_t* stages,
                                  Control<T>& control, int32_t columns, uint32_t rank) {
  Cursor<T::kStages> at;
  Cursor<TileRing::kSlots> record;
  for (Tile tile = control.ring.read(record); tile.group >= 0; tile = control.ring.read(record)) {
    const int boxes_a = existing_boxes(tile.rows, 64, T::kBoxesA);
    const int boxes_b = existing_boxes(columns - tile.column, T::kBoxWidthB, T::kBoxesB);
    const uint32_t bytes =
        boxes_a * T::kBoxBytesA + boxes_b * T::kBoxBytesB + T::InStage::kBytes;
    const bool share_a = tile.share == Share::a;
    const bool share_b = tile.share == Share::b;
    for (int32_t k = 0; k < tile.k; k += Config::tile_k) {
      control.stages.empty[at.slot].wait(at.phase ^ 1);
      CopyBarrier& full = control.stages.full[at.slot];
      full.arrive_and_expect_tx(bytes);
      uint8_t* const stage = stages + at.slot * T::kStageBytes;
      if constexpr (scaling == Fp8Scaling::block) {
        load_stage_scales<kind, T>(scales, full,
                                   stages + T::kExtraAt + at.slot * T::InStage::kBytes, tile,
                                   k);
      }
#pragma unroll
      for (int box = 0; box < T::kBoxesA; ++box) {
        if (box >= boxes_a || (share_a && box % 2 != rank)) continue;
        load_box<T::kRankA>(map_a, full, stage + box * T::kBoxBytesA,
                            fp8_coordinates_a<kind>(tile, tile.row + box * 64, k), share_a);
      }
#pragma unroll
      for (int box = 0; box < T::kBoxesB; ++box) {
        if (box >= boxes_b || (share_b && box % 2 != rank)) continue;
        load_box<T::kRankB>(
            map_b, full, stage + T::kBytesA + box * T::kBoxBytesB,
            fp8_coordinates_b<kind>(tile, tile.column + box * T::kBoxWidthB, k), share_b);
      }
      at.advance();
    }
  }
}

// The contraction of one tile by one warpgroup, which holds 64 rows of it, in split sums.
template <Gemm kind, Fp8Scaling scaling, class T, class Config>
struct SplitContraction : StageReader<T, Config> {
  using Base = StageReader<T, Config>;
  using Base::a, Base::b, Base::control, Base::lane, Base::at, Base::release, Base::stage_offset;
  using Mma = typename T::Mma;
  using Total = Accumulators<1, Config::tile_n>;
  static constexpr int kSteps = Config::tile_k / T::kMmaK;
  static constexpr int kParts = Config::tile_n / kScaleBlock;
  static constexpr uint32_t kPartStep = kScaleBlock * kSwizzleBytes / 16;  // of B's descriptor
  static_assert(T::kWaves == 1 && Config::tile_n % kScaleBlock == 0 && kSteps == 4);
  static_assert(Config::tile_k == kScaleBlock);

  const Scales<kind, scaling>* scales = nullptr;
  uint32_t stage_scales = 0;  // shared address of stage 0's scales
  uint32_t row = 0;           // this thread's first row in a tile

  template <int Parts>
  __device__ auto sum(const Tile& tile) const {
    if constexpr (scaling != Fp8Scaling::block) {
      return PlainSum{};
    } else if constexpr (kind == Gemm::wgrad) {
      const uint32_t columns = stage_scales + T::InStage::kBytesA;
      return RowAndColumnScaledSum{stage_scales + row * uint32_t(sizeof(float)),
                                   columns + lane % 4 * 2 * uint32_t(sizeof(float)), 0, 0.f, 0.f};
    } else {
      constexpr bool kForward = kind == Gemm::fprop;
      const int32_t pitch = scales->column_blocks;
      const float* const matrix =
          scales->weights + int64_t(tile.group) * scales->row_blocks * pitch;
      WeightScaledSum<Parts> sum;
      sum.rows = stage_scales + row * uint32_t(sizeof(float));
      sum.k_step = kForward ? 1 : pitch;
      sum.stages = blocks(tile.k, kScaleBlock);
#pragma unroll
      for (int part = 0; part < Parts; ++part) {
        const int64_t block = tile.column / kScaleBlock + part;
        sum.weights[part] = matrix + (kForward ? block * pitch : block);
      }
      sum.prefetch();
      return sum;
    }
  }

  // The MMAs of one part of one stage, finished on return.
  template <int Steps>
  __device__ void multiply_part(Accumulators<1, kScaleBlock>& d, int part) {
    d.fence();
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
      const uint64_t offset = stage_offset() + step * kKStep<Major::K>;
      Mma::template step<1, kScaleBlock>(d, a + offset, b + offset + part * kPartStep,
                                         step == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    d.fence();
  }

  // Where the contraction runs over tokens, the last stage gets no more MMA steps than it has
  // tokens for. Adding up is the same code for all, lest registers spill.
  __device__ void multiply_part(Accumulators<1, kScaleBlock>& d, int part, int steps) {
    if (kind != Gemm::wgrad || steps >= kSteps) {
      multiply_part<kSteps>(d, part);
    } else if (steps == 1) {
      multiply_part<1>(d, part);
    } else if (steps == 2) {
      multiply_part<2>(d, part);
    } else {
      multiply_part<3>(d, part);
    }
  }

  // The first stage's sums are the total; where they have no scale, the MMAs write them there.
  // A stage whose scales are read while adding is released after that, others as soon as the last
  // MMA has ended.
  template <int Parts, bool First, class Sum>
  __device__ void add_stage(Total& total, Accumulators<1, kScaleBlock>& partial, Sum& sum,
                            int steps) {
    control.stages.full[at.slot].wait(at.phase);
    sum.enter_stage(at.slot * T::InStage::kBytes);
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

  // All lanes have read their scales before one of them gives the stage away.
  __device__ void release_stage() {
    if (scaling == Fp8Scaling::block) __syncwarp();
    release(at.slot);
  }

  // Of at least one stage.
  template <int Parts>
  __device__ void run(Total& total, const Tile& tile) {
    auto sum = this->template sum<Parts>(tile);
    Accumulators<1, kScaleBlock> partial;
    int left = blocks(tile.k, T::kMmaK);
    add_stage<Parts, true>(total, partial, sum, left);
    while ((left -= kSteps) > 0) add_stage<Parts, false>(total, partial, sum, left);
  }

  template <int Used, class Issued>
  __device__ void run_width(Total& total, const Tile& tile, int32_t width, Issued) {
    if (kParts > 1 && width <= kScaleBlock) {
      run<1>(total, tile);
    } else {
      run<kParts>(total, tile);
    }
  }
};

// FP8 operands, as run_cta wants them.
template <Gemm kind, Fp8Scaling scaling, Accumulation accumulation, class T, class Config>
struct Fp8Operands {
  using Product = std::conditional_t<accumulation == Accumulation::split,
                                     SplitContraction<kind, scaling, T, Config>,
                                     Contraction<kind, T, Config>>;

  const CUtensorMap* a;
  const CUtensorMap* b;
  const Scales<kind, scaling>* factors;

  __device__ void prefetch() const {
    prefetch_descriptor(a);
    prefetch_descriptor(b);
    if constexpr (scaling == Fp8Scaling::block) prefetch_descriptor(&factors->a);
    if constexpr (T::InStage::kColumns) prefetch_descriptor(&factors->b);
  }

  __device__ void load(uint8_t* stages, Control<T>& control, int32_t columns,
                       uint32_t rank) const {
    load_fp8_operands<kind, scaling, T, Config>(a, b, *factors, stages, control, columns, rank);
  }

  // `row` is this thread's first row in a tile.
  __device__ void prepare(Product& product, uint8_t* stages, uint32_t row) const {
    if constexpr (accumulation == Accumulation::split) {
      product.scales = factors;
      product.stage_scales = cute::cast_smem_ptr_to_uint(stages + T::kExtraAt);
      product.row = row;
    }
  }
};

}  // namespace fusegen
