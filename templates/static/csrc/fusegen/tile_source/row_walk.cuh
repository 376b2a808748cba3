// Tiles of GEMMs whose rows are tokens: fprop and dgrad.
//
// The walk reads `group_sizes` 32 groups a step: a warp-wide prefix sum gives every group its first
// token and first tile, and the chunk stays in registers until the walk, which only moves forward,
// leaves it: E / 32 steps in all. Where rows that no group has come out zero, a pseudo-group after
// the last one owns them: its tiles have a contraction of length 0. A walk may be through a part of every
// group's row blocks.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/blocks_of_slots.cuh"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/tile_source/walker.cuh"

namespace fusegen {

// Groups in order. Every method needs all 32 lanes of the warp.
template <Gemm kind, class Config, class Part = AllBlocks>
class RowWalk : Walker<kind, Config> {
  static_assert(kind != Gemm::wgrad);
  using Base = Walker<kind, Config>;
  using Base::kAll, Base::shape, Base::lane;

 public:
  // Groups are taken as they come.
  struct Order {
    static constexpr int kScratchBytes = 0;

    template <int Threads>
    __device__ void sort(const Base&, void*) {}
  };

  __device__ RowWalk(const Base& base, const Order&, const Part& part = {})
      : Base(base), part_(part), step_(base.cluster) {
    load_chunk();
  }

  __device__ Tile next() {
    while (step_ >= chunk_step_ + __shfl_sync(kAll, steps_end_, 31)) {
      if (chunk_ + 32 >= owners()) return Base::no_tile();
      chunk_step_ += __shfl_sync(kAll, steps_end_, 31);
      chunk_token_ = __shfl_sync(kAll, end_, 31);
      chunk_ += 32;
      load_chunk();
    }
    const uint32_t offset = step_ - chunk_step_;
    const int owner = __ffs(__ballot_sync(kAll, offset < steps_end_)) - 1;
    const uint32_t end = __shfl_sync(kAll, end_, owner);
    const uint32_t tokens = __shfl_sync(kAll, tokens_, owner);
    const uint32_t first = steps_end_ - own_steps();
    const uint32_t local = offset - __shfl_sync(kAll, first, owner);
    step_ += this->clusters;
    const uint32_t group = chunk_ + owner;
    const uint32_t weight_k = kind == Gemm::fprop ? shape.k : shape.n;
    const uint32_t rows = Part::kAll ? tokens : __shfl_sync(kAll, part_.rows(tokens_), owner);
    Tile tile = this->tile(group, end - tokens, tokens, rows,
                           group < uint32_t(shape.groups) ? weight_k : 0, local);
    part_.place(tile, owner);
    return tile;
  }

 private:
  __device__ uint32_t owners() const { return shape.owners; }

  // Of this lane's group.
  __device__ uint32_t own_steps() const {
    return Base::steps(part_.rows(tokens_), this->columns());
  }

  // The pseudo-group asks for all T and gets what is left. Sums saturate at T <= 2^30, which
  // keeps them in 32 bits and is associative.
  __device__ void load_chunk() {
    const uint32_t limit = shape.tokens;
    const uint32_t group = chunk_ + lane;
    uint32_t end = group < uint32_t(shape.groups) ? this->size(group)
                   : group < owners()             ? limit
                                                  : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kAll, end, distance);
      if (lane >= distance) end = min(end + before, limit);
    }
    end_ = min(chunk_token_ + end, limit);
    const uint32_t before = __shfl_up_sync(kAll, end_, 1);
    tokens_ = end_ - (lane == 0 ? chunk_token_ : before);
    part_.find(end_ - tokens_, tokens_);
    steps_end_ = own_steps();
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t sum = __shfl_up_sync(kAll, steps_end_, distance);
      if (lane >= distance) steps_end_ += sum;
    }
  }

  Part part_;
  uint32_t step_;
  uint32_t chunk_ = 0;        // first group of the chunk in registers
  uint32_t chunk_token_ = 0;  // its first token
  uint32_t chunk_step_ = 0;   // its first step
  uint32_t end_ = 0;          // of this lane's group: one past its last token,
  uint32_t tokens_ = 0;       //   its token count,
  uint32_t steps_end_ = 0;    //   one past its last step, counted from chunk_step_
};

}  // namespace fusegen
