// Tiles of GEMMs whose contraction runs over tokens: wgrad.
//
// Every group has the same number of steps but its own cost. Largest groups come first, and from
// wave to wave the clusters rotate through its places, lest one meets the same kind of tile again
// and again: each gets nearly the same work without any counter in memory. Sizes are summed once
// per group that the walk meets.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/tile_source/walker.cuh"

namespace fusegen {

// Largest groups first, up to kSortedGroups of them. Every method needs all 32 lanes of the warp.
template <class Config>
class KWalk : Walker<Gemm::wgrad, Config> {
  using Base = Walker<Gemm::wgrad, Config>;
  using Base::kAll, Base::shape, Base::lane;

 public:
  static constexpr int kSortedGroups = 512;  // more than these are taken in order

  // The group with the r-th most tokens, in shared memory.
  struct Order {
    static constexpr int kScratchBytes = kSortedGroups * int(sizeof(uint32_t));

    uint16_t groups[kSortedGroups];

    // The whole CTA; `scratch` is in shared memory, 16-byte aligned.
    template <int Threads>
    __device__ void sort(const Base& base, void* scratch) {
      uint32_t* const sizes = static_cast<uint32_t*>(scratch);
      const int count = base.shape.groups;
      if (count > kSortedGroups) return;
      const int padded = (count + 3) / 4 * 4;  // with zeros, which rank after every real group
      for (int g = threadIdx.x; g < padded; g += Threads) sizes[g] = g < count ? base.size(g) : 0;
      __syncthreads();
      for (int g = threadIdx.x; g < count; g += Threads) {
        groups[rank_of(g, reinterpret_cast<const uint4*>(sizes), padded / 4)] = uint16_t(g);
      }
      __syncthreads();
    }
  };

  __device__ KWalk(const Base& base, const Order& order)
      : Base(base), order_(order.groups), group_steps_(Base::steps(base.shape.n, base.columns())) {}

  __device__ Tile next() {
    constexpr uint32_t kRotation = 7;
    const uint32_t place = (this->cluster + wave_ * kRotation) % this->clusters;
    const uint32_t step = wave_ * this->clusters + place;
    const uint32_t turn = step / group_steps_;
    if (turn >= uint32_t(shape.groups)) return Base::no_tile();
    ++wave_;
    if (turn != turn_) find_group(turn);
    return this->tile(group_, begin_, tokens_, shape.n, tokens_, step - turn * group_steps_);
  }

 private:
  // Groups that come before group `g`: larger ones, and among equals those of lower index.
  __device__ static int rank_of(int g, const uint4* sizes, int quads) {
    const uint32_t mine = reinterpret_cast<const uint32_t*>(sizes)[g];
    int rank = 0;
#pragma unroll 4
    for (int quad = 0; quad < quads; ++quad) {
      const uint4 other = sizes[quad];
      const int first = quad * 4;
      rank += other.x > mine || (other.x == mine && first + 0 < g);
      rank += other.y > mine || (other.y == mine && first + 1 < g);
      rank += other.z > mine || (other.z == mine && first + 2 < g);
      rank += other.w > mine || (other.w == mine && first + 3 < g);
    }
    return rank;
  }

  __device__ void find_group(uint32_t turn) {
    turn_ = turn;
    group_ = shape.groups > kSortedGroups ? turn : order_[turn];
    const uint32_t limit = shape.tokens;
    uint32_t before = 0;
    for (uint32_t g = lane; g < group_; g += 32) before = min(before + this->size(g), limit);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      before = min(before + __shfl_xor_sync(kAll, before, distance), limit);
    }
    begin_ = before;
    tokens_ = min(begin_ + this->size(group_), limit) - begin_;
  }

  const uint16_t* order_;
  uint32_t group_steps_;
  uint32_t wave_ = 0;
  uint32_t turn_ = 0xffffffffu;  // none yet
  uint32_t group_ = 0, begin_ = 0, tokens_ = 0;
};

}  // namespace fusegen
