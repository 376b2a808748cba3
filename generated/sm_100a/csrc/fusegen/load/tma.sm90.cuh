// Boxes from global into shared memory by TMA, and reads of shared memory that stay where they
// stand.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include <cstdint>

#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"

namespace fusegen {

__device__ inline void prefetch_descriptor(const CUtensorMap* map) {
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
}

template <int Rank>
__device__ void load_box(const CUtensorMap* map, CopyBarrier& barrier, void* to, BoxCoordinates at,
                         bool multicast = false) {
  constexpr uint16_t kBothCtas = 3;
  constexpr uint64_t kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  auto* bar = reinterpret_cast<uint64_t*>(&barrier);
  using Load = cute::SM90_TMA_LOAD;
  using Multicast = cute::SM90_TMA_LOAD_MULTICAST;
  if constexpr (Rank == 2) {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y);
    Load::copy(map, bar, kHint, to, at.x, at.y);
  } else if constexpr (Rank == 3) {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y, at.z);
    Load::copy(map, bar, kHint, to, at.x, at.y, at.z);
  } else {
    if (multicast) return Multicast::copy(map, bar, kBothCtas, kHint, to, at.x, at.y, at.z, at.w);
    Load::copy(map, bar, kHint, to, at.x, at.y, at.z, at.w);
  }
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
