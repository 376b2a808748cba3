// How kernels are launched, and follow each other in a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include "fusegen/common/status.h"
#include "fusegen/launch/architecture.cuh"
#include "fusegen/launch/stream.h"

namespace fusegen {

// First thing in every kernel, before it touches memory: kernels before have ended, and what they
// wrote can be seen. That holds for all of them, since the one before has waited, too.
__device__ __forceinline__ void wait_for_previous_kernel() {
  if constexpr (kProgrammaticLaunch) cudaGridDependencySynchronize();
}

// The next kernel starts once all blocks have called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (kProgrammaticLaunch) cudaTriggerProgrammaticLaunchCompletion();
}

struct Grid {
  dim3 blocks;
  int threads;
  int shared_bytes = 0;  // dynamic shared memory
  int cluster = 1;       // blocks of a cluster, along x; more than 1 where there are clusters
};

// After another kernel of the call by programmatic dependent launch, where there is such. `call` is
// what a failure is reported as.
template <class... Parameters>
Status launch_kernel(const char* call, void (*kernel)(Parameters...), const Grid& grid,
                     Stream& stream, const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(unsigned(grid.threads));
  config.dynamicSmemBytes = size_t(grid.shared_bytes);
  config.stream = stream.handle;
  config.attrs = attributes;
  if (grid.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(grid.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (kProgrammaticLaunch && stream.after_kernel) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  stream.after_kernel = true;
  return {static_cast<int>(cudaLaunchKernelEx(&config, kernel, parameters...)), call};
}

}  // namespace fusegen
