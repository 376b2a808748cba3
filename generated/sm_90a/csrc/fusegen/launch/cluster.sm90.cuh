// Clusters of blocks, which see each other's shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/launch/shared_memory.cuh"

namespace fusegen {

// A barrier of all threads of a cluster in two halves, between which a thread may do what nobody
// waits for: behind the second it sees what all have written before the first.
__device__ __forceinline__ void arrive_at_cluster() { __cluster_barrier_arrive(); }
__device__ __forceinline__ void wait_for_cluster() { __cluster_barrier_wait(); }

// What stands at an address of shared memory in another block of the cluster.
template <class T>
__device__ __forceinline__ const T* of_rank(const T* own, uint32_t rank) {
  return static_cast<const T*>(__cluster_map_shared_rank(own, rank));
}

inline constexpr int kPortableCluster = 8;  // blocks that every device with clusters has place for
inline constexpr int kLargestCluster = 16;  // that some have

// Clusters of a kernel that are on a device at once, by their size.
struct ResidentClusters {
  static constexpr int kDevices = 64;
  std::array<std::array<std::atomic<int>, kLargestCluster + 1>, kDevices> known{};  // one more than it is
  std::atomic<uint64_t> shared_memory{};

  // 0: the device has no place for one of them.
  template <class... Parameters>
  int of(void (*kernel)(Parameters...), const Grid& grid) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    const bool has_slot = device >= 0 && device < kDevices;
    if (has_slot) {
      const int found = known[device][grid.cluster].load(std::memory_order_relaxed);
      if (found > 0) return found - 1;
    }
    const int count = ask(kernel, grid);
    if (has_slot) known[device][grid.cluster].store(count + 1, std::memory_order_relaxed);
    return count;
  }

 private:
  template <class... Parameters>
  int ask(void (*kernel)(Parameters...), const Grid& grid) {
    if (!allow_shared_memory(kernel, grid.shared_bytes, shared_memory).ok()) return forget();
    constexpr auto kAttribute = cudaFuncAttributeNonPortableClusterSizeAllowed;
    if (grid.cluster > kPortableCluster &&
        cudaFuncSetAttribute(kernel, kAttribute, 1) != cudaSuccess) {
      return forget();
    }
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = unsigned(grid.cluster);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid.blocks;
    config.blockDim = dim3(unsigned(grid.threads));
    config.dynamicSmemBytes = size_t(grid.shared_bytes);
    config.attrs = &size;
    config.numAttrs = 1;
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) return forget();
    return count;
  }

  // What a device has no place for is no error of the call.
  static int forget() {
    cudaGetLastError();
    return 0;
  }
};

}  // namespace fusegen
