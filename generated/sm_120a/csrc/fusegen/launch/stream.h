// The stream of a call; host side, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "fusegen/common/status.h"

namespace fusegen {

// Every kernel waits by itself for the one before it (launch.cuh), so that it may be started while
// that one still runs. What stands in the stream before a call is not known, and may be a copy,
// after which nothing is started early.
struct Stream {
  cudaStream_t handle = nullptr;
  bool after_kernel = false;  // whether the last thing put into it by this call is a kernel
};

inline Status copy_memory(void* to, const void* from, size_t bytes, Stream& stream) {
  stream.after_kernel = false;
  const cudaError_t error =
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream.handle);
  return {static_cast<int>(error), "cudaMemcpyAsync"};
}

inline Status clear_memory(void* place, size_t bytes, Stream& stream) {
  stream.after_kernel = false;
  return {static_cast<int>(cudaMemsetAsync(place, 0, bytes, stream.handle)), "cudaMemsetAsync"};
}

}  // namespace fusegen
