// Tiles of a gradient of weights whose clusters compute neighbouring columns, not rows: A is shared.
#pragma once

#include <cstdint>

#include "fusegen/tile_source/k_walk.cuh"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/tile_source/walker.cuh"

namespace fusegen {

// A tile as high as another one is wide.
template <class Config>
struct Transposed : Config {
  static constexpr int tile_m = Config::tile_n;
  static constexpr int tile_n = Config::tile_m;
};

// The walk through the transposed gradient, `Config` being of this one.
template <class Config>
class AcrossWalk {
  using Base = Walker<Gemm::wgrad, Config>;
  using Walk = KWalk<Transposed<Config>>;

 public:
  struct Order : Walk::Order {
    template <int Threads>
    __device__ void sort(const Base& base, void* scratch) {
      Walk::Order::template sort<Threads>(transposed(base), scratch);
    }
  };

  __device__ AcrossWalk(const Base& base, const Order& order)
      : walk_(transposed(base), order), rows_(base.shape.n), columns_(base.shape.k) {}

  __device__ Tile next() {
    Tile tile = walk_.next();
    const int32_t row = tile.column, column = tile.row;
    const bool alone = tile.share == Share::b && last_of_pair(column);
    tile.rows = tile.rows > 0 ? rows_ - row : 0;
    tile.row = row;
    tile.column = column;
    if (tile.share != Share::none) tile.share = tile.share == Share::a ? Share::b : Share::a;
    if (alone) tile.share = Share::none;
    return tile;
  }

 private:
  __device__ static Walker<Gemm::wgrad, Transposed<Config>> transposed(const Base& base) {
    Shape shape = base.shape;
    shape.n = base.shape.k;
    shape.k = base.shape.n;
    return {shape, base.lane, base.rank, base.cluster, base.clusters};
  }

  // Whether one of the two CTAs that compute neighbouring columns has none: with no rows of its own it
  // would load nothing for the other.
  __device__ bool last_of_pair(int32_t column) const {
    constexpr int32_t kPair = 2 * Config::tile_n;
    return column / kPair * kPair + Config::tile_n >= columns_;
  }

  Walk walk_;
  int32_t rows_, columns_;
};

}  // namespace fusegen
