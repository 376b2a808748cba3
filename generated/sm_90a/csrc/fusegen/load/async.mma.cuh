// Copies from global to shared memory that nobody waits for at once, and loads from there.
#pragma once

#include <cstdint>

namespace fusegen {

// 16 bytes, of which `bytes` are read; the others come as zeros.
__device__ inline void copy_async(uint32_t to, const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `Left` groups of this thread's copies have landed.
template <int Left>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

__device__ inline uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline uint32_t load_shared_byte(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace fusegen
