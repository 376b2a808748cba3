// As much of CUDA as the quantise kernels use, on the CPU: one block of threads at a time, a thread
// is a fiber, which runs until it waits for its warp or its block, as far ahead of the others as
// barriers let it. Kernels whose lanes disagree about a shuffle or a barrier stop with a message
// instead of hanging.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "../../sim/fiber.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // blocks run one after another

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { uint32_t x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) {
  return {x, y, z, w};
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;
enum {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  size_t dynamicSmemBytes;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
// What a test says that a block of its GPU may have of shared memory; else that of an H200.
inline const char* const kCtaBytes = "FUSEGEN_TEST_CTA_BYTES";
inline cudaError_t cudaGetDevice(int* device) {
  *device = std::getenv(kCtaBytes) != nullptr ? 64 : 0;  // 64: one that nothing is remembered of
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  const char* const said = std::getenv(kCtaBytes);
  *value = said != nullptr ? std::atoi(said) : 232448;
  return cudaSuccess;
}
inline bool has_shared_memory(int64_t bytes) {
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  return bytes <= most;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  return has_shared_memory(bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

// Kernels run when they are launched, so copies may, too.
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* place, int value, size_t bytes, cudaStream_t) {
  std::memset(place, value, bytes);
  return cudaSuccess;
}

namespace on_cpu {

struct Warp {
  uint64_t slots[2][32];
  int64_t arrived = 0;
};

struct Thread {
  fibers::Context context;
  std::unique_ptr<char[]> stack;
  unsigned id = 0;
  int64_t warp_turn = 0, block_turn = 0, part_turn = 0;
  bool done = false;
};

struct Block {
  static constexpr size_t kStack = 128 << 10;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int64_t arrived = 0, progress = 0;
  int64_t arrived_of[16] = {};  // at barriers of a part of the threads
  unsigned live = 0;
  bool backwards = false;  // every other block: a missing barrier shows whoever runs ahead
  fibers::Context scheduler;
  Thread* current = nullptr;
  std::function<void()> body;
};

inline Block block;

inline void yield() { fibers::change(block.current->context, block.scheduler); }

inline void thread_main() {
  block.body();
  block.current->done = true;
  block.arrived -= block.current->block_turn;  // barriers wait for the living
  --block.live;
  ++block.progress;
  yield();
}

inline void wait_until(const std::function<bool()>& ready) {
  while (!ready()) yield();
}

// The value that lane `source(lane)` brings to this turn.
inline uint64_t exchange(uint64_t value, unsigned source) {
  Thread& self = *block.current;
  Warp& warp = block.warps[self.id / 32];
  const int64_t turn = ++self.warp_turn;
  warp.slots[turn % 2][self.id % 32] = value;
  ++warp.arrived;
  ++block.progress;
  if (warp.arrived < 32 * turn) wait_until([&] { return warp.arrived >= 32 * turn; });
  return warp.slots[turn % 2][source];
}

inline void run_block() {
  const unsigned count = blockDim.x;
  block.threads.resize(count);
  block.warps.assign((count + 31) / 32, Warp());
  block.arrived = 0;
  for (int64_t& arrived : block.arrived_of) arrived = 0;
  block.live = count;
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    if (!thread.stack) thread.stack.reset(new char[Block::kStack]);
    thread.id = i;
    thread.warp_turn = thread.block_turn = thread.part_turn = 0;
    thread.done = false;
    thread.context.start(thread.stack.get(), Block::kStack, thread_main);
  }
  while (block.live > 0) {
    const int64_t before = block.progress;
    for (unsigned i = 0; i < count; ++i) {
      Thread& thread = block.threads[block.backwards ? count - 1 - i : i];
      if (thread.done) continue;
      block.current = &thread;
      threadIdx = dim3(thread.id, 0, 0);
      fibers::change(block.scheduler, thread.context);
    }
    if (block.progress == before) {
      std::fprintf(stderr, "deadlock: threads of a block wait for different things\n");
      std::abort();
    }
  }
}

template <class T>
T shuffle(T value, unsigned source) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned lane() { return block.current->id % 32; }

}  // namespace on_cpu

inline void __syncthreads() {
  using on_cpu::block;
  const int64_t turn = ++block.current->block_turn;
  ++block.arrived;
  ++block.progress;
  const auto ready = [turn] { return block.arrived >= turn * int64_t(block.live); };
  if (!ready()) on_cpu::wait_until(ready);
}

// A thread always names the same barrier, and `count` threads do.
inline void __barrier_sync_count(unsigned barrier, unsigned count) {
  using on_cpu::block;
  const int64_t turn = ++block.current->part_turn;
  int64_t& arrived = block.arrived_of[barrier];
  ++arrived;
  ++block.progress;
  const auto ready = [&arrived, turn, count] { return arrived >= turn * int64_t(count); };
  if (!ready()) on_cpu::wait_until(ready);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return on_cpu::shuffle(value, on_cpu::lane() ^ unsigned(mask));
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance, int width = 32) {
  const unsigned lane = on_cpu::lane();
  return on_cpu::shuffle(value, lane % unsigned(width) >= distance ? lane - distance : lane);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance, int width = 32) {
  const unsigned lane = on_cpu::lane();
  const bool inside = lane % unsigned(width) + distance < unsigned(width);
  return on_cpu::shuffle(value, inside ? lane + distance : lane);
}
template <class T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const unsigned first = on_cpu::lane() / unsigned(width) * unsigned(width);
  return on_cpu::shuffle(value, first + unsigned(source) % unsigned(width));
}
template <class Combine>
unsigned on_cpu_reduce(unsigned value, Combine combine) {
  unsigned result = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    result = combine(result, __shfl_xor_sync(0xffffffffu, result, distance));
  }
  return result;
}
inline void __syncwarp() { on_cpu::shuffle(0u, on_cpu::lane()); }
inline unsigned __ballot_sync(unsigned, bool value) {
  return on_cpu_reduce(unsigned(value) << on_cpu::lane(), [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return on_cpu_reduce(value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return on_cpu_reduce(value, [](unsigned a, unsigned b) { return a + b; });
}

// Of shared memory, whose addresses only PTX takes.
size_t __cvta_generic_to_shared(const void*);

namespace on_cpu {
inline int waits = 0;  // of all threads, for a kernel before theirs: kernels run one after another
}
inline void cudaGridDependencySynchronize() { ++on_cpu::waits; }
inline void cudaTriggerProgrammaticLaunchCompletion() {}

template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
template <class T>
T __ldg(const T* from) { return *from; }
template <class T>
T __ldcs(const T* from) { return *from; }
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
void __stcs(T* to, T value) { *to = value; }
template <class T>
void __stwb(T* to, T value) { *to = value; }

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
// Drops a signalling NaN, too, where std::fmax does not.
inline float on_cpu_max(float a, float b) { return a != a || a < b ? b : a; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= uint32_t(both >> ((selector >> (4 * i) & 7) * 8) & 0xFF) << (8 * i);
  }
  return result;
}
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  if (value > before) *at = value;
  return before;
}

namespace on_cpu {
inline int attributes = 0;  // of the last launch
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... in) {
  if (!has_shared_memory(int64_t(config->dynamicSmemBytes))) return cudaErrorInvalidValue;
  on_cpu::attributes = config->numAttrs;
  on_cpu::block.body = [&] { kernel(in...); };
  blockDim = config->blockDim;
  gridDim = config->gridDim;
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = dim3(x, y, z);
        on_cpu::block.backwards = !on_cpu::block.backwards;
        on_cpu::run_block();
      }
    }
  }
  return cudaSuccess;
}
