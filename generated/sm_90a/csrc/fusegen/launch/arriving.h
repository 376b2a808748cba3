// Rows of an operand that are still on their way when a call begins; host side, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/status.h"
#include "fusegen/launch/stream.h"

namespace fusegen {

// What is put into one stream from now on comes behind what is in another.
inline Status go_behind(cudaStream_t later, cudaStream_t earlier) {
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return {static_cast<int>(error), "cudaEventCreateWithFlags"};
  error = cudaEventRecord(event, earlier);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event, 0);
  const cudaError_t freed = cudaEventDestroy(event);
  return {static_cast<int>(error != cudaSuccess ? error : freed), "cudaStreamWaitEvent"};
}

// Tokens [first, end) of an operand are there. Another stream brings the others, by what it has been
// given before the call.
struct Arriving {
  int64_t first, end;
  cudaStream_t bringing;  // nullptr: all are there

  // The stream by its handle, as Python has it.
  Arriving(int64_t first, int64_t end, int64_t bringing)
      : first(first), end(end), bringing(reinterpret_cast<cudaStream_t>(bringing)) {}

  bool is_all() const { return bringing == nullptr; }

  // What is put into the stream from now on finds all of them. The second wait is none.
  Status wait(Stream& stream) {
    if (is_all()) return {};
    const Status status = go_behind(stream.handle, bringing);
    stream.after_kernel = false;
    bringing = nullptr;
    return status;
  }
};

}  // namespace fusegen
