// Leave for kernels that need more shared memory than every kernel may have.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "fusegen/common/status.h"

namespace fusegen {

// Raises the shared memory limit once per process and device.
template <class Kernel>
Status allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return {static_cast<int>(error), "cudaGetDevice"};
  }
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return {};
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return {static_cast<int>(error), "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)"};
}

}  // namespace fusegen
