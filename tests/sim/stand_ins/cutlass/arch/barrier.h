#pragma once

#include "copies.h"

namespace cutlass::arch {

struct ClusterBarrier {
  uint64_t barrier_;

  void init(uint32_t count) { own() = {0, count, count, 0, sim::Mbarrier::kValid}; }
  void wait(uint32_t phase) const { own().wait(phase & 1); }
  void arrive() const { own().arrive(); }
  void arrive(uint32_t rank) const { sim::barrier_of(int(rank), this).arrive(); }

 protected:
  sim::Mbarrier& own() const { return sim::barrier_of(sim::cta(), this); }
};

struct ClusterTransactionBarrier : ClusterBarrier {
  // Bytes first: the phase must not end between the two.
  void arrive_and_expect_tx(uint32_t bytes) const {
    own().bytes += int32_t(bytes);
    own().arrive();
  }
};

inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}

}  // namespace cutlass::arch
