#pragma once

#include "copies.h"

namespace fusegen {

inline uint32_t shared_address(const void* pointer) { return sim::shared_address(pointer); }

class Barrier {
 public:
  void init(uint32_t arrivals) { own() = {0, arrivals, arrivals, 0, sim::Mbarrier::kValid}; }
  void wait(uint32_t parity) const { own().wait(parity & 1); }
  void arrive() const { own().arrive(); }
  void arrive(uint32_t rank) const { sim::barrier_of(int(rank), this).arrive(); }

 protected:
  sim::Mbarrier& own() const { return sim::barrier_of(sim::cta(), this); }

 private:
  uint64_t state_;
};

class CopyBarrier : public Barrier {
 public:
  // Bytes first: the phase must not end between the two.
  void arrive_and_expect_tx(uint32_t bytes) const {
    own().bytes += int32_t(bytes);
    own().arrive();
  }
};

inline void fence_barrier_init() {}

inline void cluster_arrive() { sim::arrive_at_cluster(); }
inline void cluster_arrive_relaxed() { sim::arrive_at_cluster(); }
inline void cluster_wait() { sim::wait_for_cluster(); }

template <int Registers>
void raise_registers() {}
template <int Registers>
void lower_registers() {}

// Between two ways to memory that the simulation does not tell apart.
inline void fence_async_shared() {}

inline void commit_stores() { sim::stores[sim::cluster.current].commit(); }
template <int Left>
void wait_for_stores() {
  sim::stores[sim::cluster.current].finish_all_but(Left);
}

}  // namespace fusegen
