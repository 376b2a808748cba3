// What the kernels see of CUDA: built-in variables and functions, and the launch of a grid, whose
// clusters run one after another. Types and conversions are those of the CUDA toolkit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <tuple>
#include <type_traits>

#include "matrices.h"
#include "warps.h"

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif

inline dim3 threadIdx, blockIdx, gridDim;

template <class Value>
Value __shfl_sync(unsigned, Value value, int source, int width = 32) {
  return sim::shuffle(value, sim::lane() / width * width + source % width);
}
template <class Value>
Value __shfl_up_sync(unsigned, Value value, int distance) {
  return sim::shuffle(value, sim::lane() - distance);
}
template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return sim::shuffle(value, sim::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* const votes = sim::exchange(uint64_t(vote));
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= unsigned(votes[i]) << i;
  return ballot;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const uint64_t* const values = sim::exchange(uint64_t(value));
  unsigned largest = 0;
  for (int i = 0; i < 32; ++i) largest = unsigned(values[i]) > largest ? unsigned(values[i]) : largest;
  return largest;
}
inline unsigned atomicMax(unsigned* to, unsigned value) {
  const unsigned before = *to;
  if (value > before) *to = value;
  return before;
}
inline float __frcp_rn(float value) { return 1.0f / value; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
template <class Pair>
Pair __hfma2(Pair a, Pair b, Pair c) {
  const auto fma = [](auto x, auto y, auto z) { return decltype(x)(float(x) * float(y) + float(z)); };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
inline int __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline void cudaGridDependencySynchronize() {}  // kernels run one after another
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void __syncthreads() { sim::sync_block(); }
inline void __syncwarp() { sim::sync_warp(); }
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return sim::shared_address(pointer);
}
inline void* __cvta_shared_to_generic(size_t address) {
  return sim::shared_pointer(uint32_t(address), 1);
}
inline void __threadfence() {}
// The place in the shared memory of CTA `rank` that lies where `own` does in this one.
inline void* __cluster_map_shared_rank(const void* own, unsigned rank) {
  if (int(rank) >= sim::cluster.ctas) sim::fail("shared memory of a CTA that does not exist");
  return sim::cluster.memory[rank] + sim::offset_of(own);
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }

template <class Value>
Value __ldg(const Value* from) {
  return sim::load_global(from);
}

template <class A, class B>
auto max(A a, B b) {
  using Common = std::common_type_t<A, B>;
  return Common(a) > Common(b) ? Common(a) : Common(b);
}
template <class A, class B>
auto min(A a, B b) {
  using Common = std::common_type_t<A, B>;
  return Common(a) < Common(b) ? Common(a) : Common(b);
}

namespace sim {

inline void leave() {
  if (!mmas[cluster.current].empty()) fail("left before its MMAs were waited for");
  if (!stores[cluster.current].empty()) fail("left before its stores had read shared memory");
  if (!copies[cluster.current].empty()) fail("left before its copies had landed");
}

inline unsigned cluster_size(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return config.attrs[i].val.clusterDim.x;
    }
  }
  return 1;
}

}  // namespace sim

// A stream is nullptr, or a function, which does what is in it.
inline void finish(cudaStream_t stream) {
  if (stream != nullptr) (*reinterpret_cast<std::function<void()>*>(stream))();
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const unsigned size = sim::cluster_size(*config);
  if (config->dynamicSmemBytes > sim::kSharedBytes) return cudaErrorInvalidValue;
  const unsigned threads = config->blockDim.x;
  if (threads == 0 || threads % 128 != 0 || threads > sim::kMostThreads) return cudaErrorInvalidValue;
  if (config->gridDim.x == 0 || config->gridDim.x % size != 0) return cudaErrorInvalidValue;
  finish(config->stream);
  const std::tuple<std::decay_t<Parameters>...> parameters(arguments...);
  gridDim = config->gridDim;
  for (unsigned first = 0; first < gridDim.x; first += size) {
    const auto enter = [first, threads](int index) {
      threadIdx = dim3(unsigned(index) % threads);
      blockIdx = dim3(first + unsigned(index) / threads);
    };
    sim::run_cluster(int(size), int(threads), [&] { std::apply(kernel, parameters); }, sim::leave, enter);
  }
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

extern "C" inline cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes,
                                              cudaStream_t) {
  std::memset(place, value, bytes);
  return cudaSuccess;
}

extern "C" inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
extern "C" inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  finish(stream);
  return cudaSuccess;
}
extern "C" inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}
extern "C" inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

extern "C" inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

extern "C" inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&sim::encode);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
