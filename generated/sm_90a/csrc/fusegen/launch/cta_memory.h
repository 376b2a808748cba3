// What the device at hand lets a CTA have; host side, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace fusegen {

// Bytes of shared memory that one CTA may have on the current device, which is asked once per
// process; 0 where it cannot be asked, which the launch that follows says by itself.
inline int cta_shared_memory() {
  constexpr int kSlots = 64;
  static std::array<std::atomic<int>, kSlots> known{};
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  const bool has_slot = device >= 0 && device < kSlots;
  if (has_slot) bytes = known[device].load(std::memory_order_relaxed);
  if (bytes > 0) return bytes;
  constexpr cudaDeviceAttr kAttribute = cudaDevAttrMaxSharedMemoryPerBlockOptin;
  if (cudaDeviceGetAttribute(&bytes, kAttribute, device) != cudaSuccess) return 0;
  if (has_slot) known[device].store(bytes, std::memory_order_relaxed);
  return bytes;
}

}  // namespace fusegen
