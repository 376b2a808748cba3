// Instructions of Hopper and later that CUDA C++ has no function for (PTX ISA), and barriers made of
// them. They stand here because headers that have more of them take seconds to parse in every unit.
// What orders accesses to memory says so to the compiler, too.
#pragma once

#include <cstdint>

namespace fusegen {

// How instructions name what lies in shared memory.
__device__ inline uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: phases of so many arrivals ----

class Barrier {
 public:
  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }

  // Until the phase of this parity has ended.
  __device__ void wait(uint32_t parity) const {
    constexpr uint32_t kNanoseconds = 10'000'000;  // after which a try may give up
    asm volatile(
        "{\n.reg .pred ended;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1, %2;\n"
        "@ended bra ENDED;\n"
        "bra AGAIN;\n"
        "ENDED:\n}" ::"r"(address()),
        "r"(parity), "r"(kNanoseconds)
        : "memory");
  }

  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // At the barrier in the same place of CTA `rank` of the cluster.
  __device__ void arrive(uint32_t rank) const {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address()),
        "r"(rank)
        : "memory");
  }

 protected:
  __device__ uint32_t address() const { return shared_address(&state_); }

 private:
  uint64_t state_;
};

// One whose phases end when so many bytes have come, too.
class CopyBarrier : public Barrier {
 public:
  __device__ void arrive_and_expect_tx(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
};

// After the first barriers of a cluster are made, before another CTA's threads use them.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- the cluster: a thread arrives, and waits for all others to have ----

__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// ---- a warpgroup's registers ----

template <int Registers>
__device__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- copies ----

// What threads wrote to shared memory before it, copies and MMAs read behind it.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A thread's stores since the last call are a group.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last `Left` groups have been read from shared memory.
template <int Left>
__device__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
}

}  // namespace fusegen
