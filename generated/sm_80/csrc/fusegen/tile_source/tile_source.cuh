// The tile source of each GEMM.
//
// Before the first tile the whole CTA sorts the groups as the source wants them (`Order`, in shared
// memory); then one warp constructs the source and asks for tiles until one has a negative group.
#pragma once

#include <type_traits>

#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/k_walk.cuh"
#include "fusegen/tile_source/row_walk.cuh"

namespace fusegen {

// `Config` has tile_m, tile_n and cluster, the number of CTAs that compute neighbouring tiles. Where
// rows are tokens, `Part` says which of them.
template <Gemm kind, class Config, class Part = AllBlocks>
using TileSource =
    std::conditional_t<kind == Gemm::wgrad, KWalk<Config>, RowWalk<kind, Config, Part>>;

}  // namespace fusegen
