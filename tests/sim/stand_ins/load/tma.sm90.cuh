#pragma once

#include "copies.h"

#include "fusegen/common/instructions.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"

namespace fusegen {

inline void prefetch_descriptor(const CUtensorMap* map) { sim::map_of(map); }

template <int Rank>
void load_box(const CUtensorMap* map, CopyBarrier& barrier, void* to, BoxCoordinates at,
              bool multicast = false) {
  const int32_t places[] = {at.x, at.y, at.z, at.w};
  const auto ctas = uint16_t(multicast ? 3 : 1 << sim::cta());
  sim::load_box(map, &barrier, ctas, to, {places, places + Rank});
}

inline float load_shared(uint32_t address) { return sim::load_shared<float>(address); }
inline float2 load_shared_pair(uint32_t address) { return sim::load_shared<float2>(address); }

}  // namespace fusegen
