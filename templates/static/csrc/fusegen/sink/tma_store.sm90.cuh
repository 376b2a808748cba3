// Results into global memory by TMA, each warp its own: no barrier among warps, so that one's
// stores overlap its neighbours' conversions and the next tile's loads.
#pragma once


#include <cstdint>

#include "fusegen/fragment/fragment.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

enum class Write {
  rows,    // of a group of tokens, through a ragged descriptor
  matrix,  // of one of E matrices
  add,     // to what is in it
};

// Where a part of the result lies.
template <Write write>
__device__ BoxCoordinates result_coordinates(const Tile& tile, Place place) {
  if constexpr (write == Write::rows) {
    return ragged_coordinates(place.column, tile.begin, tile.tokens, tile.row + place.row);
  }
  return {place.column, tile.row + place.row, tile.group, 0};
}

template <Write write>
__device__ void store_box(const CUtensorMap* map, uint32_t buffer, BoxCoordinates at) {
  if constexpr (write == Write::add) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
  } else if constexpr (write == Write::rows) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map),
        "r"(buffer), "r"(at.x), "r"(at.y), "r"(at.z)
        : "memory");
  }
}

// From a warp's buffer. Lane 0 asks for it and waits for its end.
template <Write write>
__device__ void send_chunk(const CUtensorMap* map, uint32_t buffer, const Tile& tile, Place place) {
  store_box<write>(map, buffer, result_coordinates<write>(tile, place));
  commit_stores();
}

// The sink of one warp; `Change` loads nothing.
template <class Result, Write write, int Buffers, class Change = Keep>
struct TmaStore {
  static constexpr int kColumns = kStoreColumns<Result>;  // of a part

  const CUtensorMap* map;
  ChunkRing<Buffers> ring;
  uint32_t lane;
  Change change;

  __device__ void start(const Tile&, Place) {}

  // Calls function(sink) with the sink of a tile's parts.
  template <class Function>
  __device__ void with(Function function) {
    function(*this);
  }

  __device__ void put(const Fragment<kColumns>& part, const Tile& tile, Place place) {
    send(map, tile, place, [&](uint32_t buffer) {
      WriteChunk<Result>::template run<false>(part, buffer, change.begin(tile));
    });
  }

  // What fill(buffer) writes, into the tensor of a descriptor.
  template <class Fill>
  __device__ void send(const CUtensorMap* to, const Tile& tile, Place place, Fill fill) {
    if (lane == 0) wait_for_stores<Buffers - 1>();
    __syncwarp();
    fill(ring.address());
    fence_async_shared();
    __syncwarp();
    if (lane == 0) send_chunk<write>(to, ring.address(), tile, place);
    ring.advance();
  }

  __device__ void drain() {
    if (lane == 0) wait_for_stores<0>();
  }
};

}  // namespace fusegen
