// One CTA of a GEMM: its shared memory, its barriers, its place in the cluster.
#pragma once

#include <cstdint>

#include "fusegen/common/instructions.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ring.sm90.cuh"

namespace fusegen {

// What warps tell each other. `T` are a kernel's traits.
template <class T>
struct Control {
  StageBarriers<T::kStages> stages;
  Barrier turn[2];  // of the math warpgroups, where they take turns
  TileRing ring;
  CopyBarrier loaded[T::kMathWarps][T::kBuffers];  // where results meet other values
  typename T::Source::Order order;

  // One thread, before any other one touches it.
  __device__ void init() {
    constexpr int kReadersPerStage = T::kPingpong ? T::kMathWarps / 2 : T::kMathWarps;
    stages.init(T::kCluster * kReadersPerStage, 32 * T::kGatherWarps);
    turn[0].init(T::kMathWarps / 2);
    turn[1].init(T::kMathWarps / 2);
    ring.init(1 + (T::kGatherWarps > 0 ? 64 : 0) + 32 * T::kMathWarps);
    if constexpr (loads(T::kStore)) {
      for (auto& barriers : loaded) {
        for (CopyBarrier& barrier : barriers) barrier.init(1);
      }
    }
    fence_barrier_init();
  }
};

// The calling thread's view. `shared` is all of the CTA's shared memory, 1024-byte aligned.
template <class T, template <class> class ControlOf = Control>
struct Cta {
  uint8_t* shared;  // stages first
  uint32_t warp, lane;
  uint32_t rank;  // in the cluster

  __device__ explicit Cta(uint8_t* shared)
      : shared(shared),
        warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane(threadIdx.x % 32),
        rank(T::kCluster == 1 ? 0 : blockIdx.x % T::kCluster) {}

  __device__ uint8_t* buffers() const { return shared + T::kBuffersAt; }

  __device__ ControlOf<T>& control() const {
    static_assert(sizeof(ControlOf<T>) <= T::kControlBytes);
    return *reinterpret_cast<ControlOf<T>*>(shared + T::kControlAt);
  }

  __device__ typename T::Walk walk(const Shape& shape) const {
    return {shape, lane, rank, blockIdx.x / T::kCluster, gridDim.x / T::kCluster};
  }

  // Until all threads of the cluster can use its barriers.
  __device__ void enter() const {
    if constexpr (T::kCluster > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
    __syncthreads();
  }

  // A CTA must not leave while its neighbour may still write to it.
  __device__ void leave() const {
    if constexpr (T::kCluster > 1) {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
    }
  }
};

}  // namespace fusegen
