// Which output tile a CTA computes next, for groups whose sizes only the device knows.
//
// Tiles are numbered group after group; cluster c of C takes tiles c, c + C, c + 2C, ... One warp
// of each CTA finds them. Where rows are tokens (RowWalk) it walks `group_sizes` 32 groups a step:
// a warp-wide prefix sum gives every group its first token and first tile, and the chunk stays in
// registers until the walk, which only moves forward, leaves it: E / 32 steps in all. Where the
// contraction runs over tokens (DepthWalk) it sums sizes once per group that it meets. A size is
// clamped to [0, T] and a prefix to T, so that any group_sizes stay in bounds. Where rows are
// tokens, a pseudo-group after the last one owns the rows that no group has: its tiles have depth
// 0 and come out zero.
//
// A cluster of two computes two tiles that share an operand, which each CTA loads half of and
// multicasts: two row blocks of one column block (B shared), or, for the odd last row block of a
// group, two column blocks of it (A shared). Only where both counts are odd one CTA has no tile
// of its own; it still loads its half for the other.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"

namespace fusegen {

enum class Share : int32_t { none, a, b };

struct alignas(16) Tile {
  int32_t group;   // negative: no more tiles
  int32_t row;     // first row, counted from the group's first row (wgrad: of N)
  int32_t rows;    // rows that exist; below 1 the CTA only helps its neighbour
  int32_t column;  // first column
  int32_t begin;   // the group's first token
  int32_t tokens;  // the group's token count
  int32_t depth;   // contraction length; 0 gives zeros
  Share share;
};

struct Shape {
  const int64_t* group_sizes;  // [groups] on the device; nullptr: one group of all tokens
  int32_t tokens;
  int32_t groups;
  int32_t n;
  int32_t k;
};

__host__ __device__ constexpr uint32_t blocks(uint32_t extent, uint32_t size) {
  return (extent + size - 1) / size;
}

// Row blocks per super-row, about: of 8 and 16, the one whose wave of tiles reads fewer bytes.
template <int TileM, int TileN>
constexpr uint32_t super_row() {
  constexpr uint32_t kWave = 132;
  constexpr uint32_t narrow = 8 * TileM + blocks(kWave, 8) * TileN;
  constexpr uint32_t wide = 16 * TileM + blocks(kWave, 16) * TileN;
  return narrow < wide ? 8 : 16;
}

// Super-rows of one group have equal, even heights: a short last one would read every column
// block again for a few row blocks.
template <int SuperRow>
__device__ uint32_t super_row_height(uint32_t row_blocks) {
  const uint32_t count = max(1u, (row_blocks + SuperRow / 2) / SuperRow);
  return (blocks(row_blocks, count) + 1) / 2 * 2;
}

// Cluster steps of so many row blocks. Additive over super-rows because those are even.
template <int Cluster>
__host__ __device__ constexpr uint32_t group_steps(uint32_t row_blocks, uint32_t column_blocks) {
  if constexpr (Cluster == 1) return row_blocks * column_blocks;
  return (column_blocks / 2) * row_blocks + (column_blocks % 2) * ((row_blocks + 1) / 2);
}

struct Block {
  uint32_t row, column;
  Share share;
};

// Step -> row and column block: super-rows outermost, then columns, then rows of the super-row.
template <int Cluster, int SuperRow>
__device__ Block raster(uint32_t step, uint32_t row_blocks, uint32_t column_blocks,
                        uint32_t rank) {
  const uint32_t full_height = super_row_height<SuperRow>(row_blocks);
  const uint32_t per_super_row = group_steps<Cluster>(full_height, column_blocks);
  const uint32_t first = step / per_super_row * full_height;
  const uint32_t local = step % per_super_row;
  const uint32_t height = min(full_height, row_blocks - first);
  if constexpr (Cluster == 1) {
    return {first + local % height, local / height, Share::none};
  }
  const uint32_t column_pair = local / height;
  const uint32_t position = local % height;
  if (column_pair >= column_blocks / 2) {
    const uint32_t pair = local - (column_blocks / 2) * height;
    return {first + 2 * pair + rank, column_blocks - 1, Share::b};
  }
  const uint32_t pairs = height / 2;
  if (position == 2 * pairs) return {first + position, 2 * column_pair + rank, Share::a};
  const uint32_t right = position >= pairs;
  return {first + 2 * (position - right * pairs) + rank, 2 * column_pair + right, Share::b};
}

// What both walks share: the place of a cluster in the launch and the last step from a group's
// step to a tile.
template <Gemm kind, class Config>
struct Walker {
  static constexpr int kSuperRow = super_row<Config::tile_m, Config::tile_n>();
  static constexpr unsigned kAll = 0xffffffffu;

  Shape shape;
  uint32_t lane, rank, cluster, clusters;

  __device__ uint32_t columns() const { return kind == Gemm::fprop ? shape.n : shape.k; }

  // A size clamped to [0, T].
  __device__ uint32_t size(uint32_t group) const {
    if (shape.group_sizes == nullptr) return shape.tokens;
    const int64_t wanted = shape.group_sizes[group];
    return uint32_t(max(int64_t(0), min(wanted, int64_t(shape.tokens))));
  }

  __device__ static uint32_t steps(uint32_t rows, uint32_t columns) {
    return group_steps<Config::cluster>(blocks(rows, Config::tile_m),
                                        blocks(columns, Config::tile_n));
  }

  __device__ Tile tile(uint32_t group, uint32_t begin, uint32_t tokens, uint32_t rows,
                       uint32_t depth, uint32_t step) const {
    const Block block =
        raster<Config::cluster, kSuperRow>(step, blocks(rows, Config::tile_m),
                                           blocks(columns(), Config::tile_n), rank);
    const int32_t row = block.row * Config::tile_m;
    return {int32_t(group),
            row,
            int32_t(rows) - row,
            int32_t(block.column) * Config::tile_n,
            int32_t(begin),
            int32_t(tokens),
            int32_t(depth),
            block.share};
  }

  __device__ static Tile no_tile() { return {-1, 0, 0, 0, 0, 0, 0, Share::none}; }
};

// Where rows are tokens: groups in order. Every method needs all 32 lanes of the warp.
template <Gemm kind, class Config>
class RowWalk : Walker<kind, Config> {
  static_assert(kind != Gemm::wgrad);
  using Base = Walker<kind, Config>;
  using Base::kAll, Base::shape, Base::lane;

 public:
  __device__ explicit RowWalk(const Base& base) : Base(base), step_(base.cluster) { load_chunk(); }

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
    const uint32_t first = steps_end_ - Base::steps(tokens_, this->columns());
    const uint32_t local = offset - __shfl_sync(kAll, first, owner);
    step_ += this->clusters;
    const uint32_t group = chunk_ + owner;
    const uint32_t weight_depth = kind == Gemm::fprop ? shape.k : shape.n;
    return this->tile(group, end - tokens, tokens, tokens,
                      group < uint32_t(shape.groups) ? weight_depth : 0, local);
  }

 private:
  __device__ uint32_t owners() const { return shape.groups + 1; }

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
    steps_end_ = Base::steps(tokens_, this->columns());
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t sum = __shfl_up_sync(kAll, steps_end_, distance);
      if (lane >= distance) steps_end_ += sum;
    }
  }

  uint32_t step_;
  uint32_t chunk_ = 0;        // first group of the chunk in registers
  uint32_t chunk_token_ = 0;  // its first token
  uint32_t chunk_step_ = 0;   // its first step
  uint32_t end_ = 0;          // of this lane's group: one past its last token,
  uint32_t tokens_ = 0;       //   its token count,
  uint32_t steps_end_ = 0;    //   one past its last step, counted from chunk_step_
};

// Where the contraction runs over tokens: every group has the same number of steps but its own
// cost. Largest groups come first, and from wave to wave the clusters rotate through its places,
// lest one meets the same kind of tile again and again: each gets nearly the same work without any
// counter in memory.
template <class Config>
class DepthWalk : Walker<Gemm::wgrad, Config> {
  using Base = Walker<Gemm::wgrad, Config>;
  using Base::kAll, Base::shape, Base::lane;

 public:
  static constexpr int kSortedGroups = 512;  // more than these are taken in order

  // order[r] = the group with the r-th most tokens. The whole CTA; `sizes` is scratch.
  template <int Threads>
  __device__ static void sort(const Base& base, uint32_t* sizes, uint16_t* order) {
    const int groups = base.shape.groups;
    if (groups > kSortedGroups) return;
    const int padded = (groups + 3) / 4 * 4;  // with zeros, which rank after every real group
    for (int g = threadIdx.x; g < padded; g += Threads) sizes[g] = g < groups ? base.size(g) : 0;
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += Threads) {
      order[rank_of(g, reinterpret_cast<const uint4*>(sizes), padded / 4)] = uint16_t(g);
    }
    __syncthreads();
  }

  __device__ DepthWalk(const Base& base, const uint16_t* order)
      : Base(base), order_(order), group_steps_(Base::steps(base.shape.n, base.columns())) {}

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
