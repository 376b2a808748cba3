// Which output tile a CTA computes next, for groups whose sizes only the device knows.
//
// Tiles are numbered group after group; cluster c of C takes tiles c, c + C, c + 2C, ... One warp
// of each CTA finds them. A size is clamped to [0, T] and a prefix to T, so that any group_sizes
// stay in bounds.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/raster.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

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
                       uint32_t k, uint32_t step) const {
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
            int32_t(k),
            block.share};
  }

  __device__ static Tile no_tile() { return {-1, 0, 0, 0, 0, 0, 0, Share::none}; }
};

}  // namespace fusegen
