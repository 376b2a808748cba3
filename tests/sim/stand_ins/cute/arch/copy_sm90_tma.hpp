#pragma once

#include "copies.h"

namespace cute {

namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL = 0 };
}

struct TmaDescriptor {};
inline void prefetch_tma_descriptor(const TmaDescriptor* map) { sim::map_of(map); }

struct SM90_TMA_LOAD {
  template <class... Coordinates>
  static void copy(const void* map, uint64_t* barrier, uint64_t, void* to, Coordinates... at) {
    sim::load_box(map, barrier, uint16_t(1 << sim::cta()), to, {at...});
  }
};

struct SM90_TMA_LOAD_MULTICAST {
  template <class... Coordinates>
  static void copy(const void* map, uint64_t* barrier, uint16_t ctas, uint64_t, void* to,
                   Coordinates... at) {
    sim::load_box(map, barrier, ctas, to, {at...});
  }
};

// Between two ways to memory that the simulation does not tell apart.
inline void tma_store_fence() {}
inline void tma_store_arrive() { sim::stores[sim::cluster.current].commit(); }
template <int Left>
void tma_store_wait() {
  sim::stores[sim::cluster.current].finish_all_but(Left);
}

}  // namespace cute
