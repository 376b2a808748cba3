// Boxes from global into shared memory by TMA, and reads of shared memory that stay where they
// stand.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/common/instructions.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"

namespace fusegen {

__device__ inline void prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box into shared memory at `to`, of this CTA or of both of a cluster; its bytes come to `barrier`.
template <int Rank>
__device__ void load_box(const CUtensorMap* map, CopyBarrier& barrier, void* to, BoxCoordinates at,
                         bool multicast = false) {
  constexpr uint16_t kBothCtas = 3;
  constexpr uint64_t kEvictNormal = uint64_t(1) << 60;
  const uint32_t place = shared_address(to), loaded = shared_address(&barrier);
#define FUSEGEN_LOAD(RANK, COORDINATES, ...)                                                  \
  if (multicast) {                                                                            \
    asm volatile("cp.async.bulk.tensor." RANK                                                 \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"    \
                 ".L2::cache_hint [%0], [%1, {" COORDINATES "}], [%2], %3, %4;" ::"r"(place), \
                 "l"(map), "r"(loaded), "h"(kBothCtas), "l"(kEvictNormal), __VA_ARGS__        \
                 : "memory");                                                                 \
  } else {                                                                                    \
    asm volatile("cp.async.bulk.tensor." RANK                                                 \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes"                       \
                 ".L2::cache_hint [%0], [%1, {" COORDINATES "}], [%2], %4;" ::"r"(place),     \
                 "l"(map), "r"(loaded), "h"(kBothCtas), "l"(kEvictNormal), __VA_ARGS__        \
                 : "memory");                                                                 \
  }
  if constexpr (Rank == 2) {
    FUSEGEN_LOAD("2d", "%5, %6", "r"(at.x), "r"(at.y))
  } else if constexpr (Rank == 3) {
    FUSEGEN_LOAD("3d", "%5, %6, %7", "r"(at.x), "r"(at.y), "r"(at.z))
  } else {
    static_assert(Rank == 4);
    FUSEGEN_LOAD("4d", "%5, %6, %7, %8", "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w))
  }
#undef FUSEGEN_LOAD
}

// Reads that neither pass the barriers around them nor are repeated.
__device__ inline float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace fusegen
