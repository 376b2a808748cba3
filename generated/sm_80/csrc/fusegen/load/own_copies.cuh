// Copies into shared memory that go on while a thread computes, and that it alone reads: its own
// wait is enough, and no barrier is.
//
// They take registers neither under way nor when they have landed, so that more of them may be under
// way than a thread could hold.
#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime_api.h>

namespace fusegen {

// 16 bytes of global memory, aligned to 16.
__device__ __forceinline__ void copy_own(uint4* to, const void* from) {
  __pipeline_memcpy_async(to, from, sizeof(uint4));
}

// What this thread has begun to copy since the last call is a group, which may have nothing in it.
__device__ __forceinline__ void end_group_of_copies() { __pipeline_commit(); }

// Until all groups of this thread have landed but for the last `left`, of at most two.
__device__ __forceinline__ void wait_for_own_copies(int left) {
  if (left == 0) {
    __pipeline_wait_prior(0);
  } else if (left == 1) {
    __pipeline_wait_prior(1);
  } else {
    __pipeline_wait_prior(2);
  }
}

}  // namespace fusegen
