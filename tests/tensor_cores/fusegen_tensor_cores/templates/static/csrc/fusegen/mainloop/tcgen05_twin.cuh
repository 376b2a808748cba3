// The functions of mainloop/tcgen05.sm100.cuh in software, for GPUs from sm_90 on and for the CPU.
//
// Tensor memory lies in global memory, and a warp multiplies what the matrix descriptors and the
// instruction descriptor name, field by field as the PTX ISA has them. This is slow, for small
// shapes; loads, barriers, groups, visitors and stores around it are the real ones.
#ifndef FUSEGEN_TCGEN05
#define FUSEGEN_TCGEN05

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

#include "fusegen/load/ring.sm90.cuh"

namespace fusegen::tcgen05 {

enum class Kind { f16, f8f6f4 };

inline constexpr uint32_t kMostCtas = 132;  // SMs of an H200
inline constexpr uint32_t kLanes = 128, kColumns = 512;
static __device__ float memory[kMostCtas][kLanes][kColumns];

// Of an address: the upper half is a lane, the lower one a column.
__device__ inline float& sum_at(uint32_t address) {
  return memory[blockIdx.x][address >> 16][address & 0xffff];
}

template <int Columns>
__device__ void allocate(uint32_t* to) {
  static_assert(Columns >= 32 && Columns <= int(kColumns) && (Columns & (Columns - 1)) == 0);
  *to = 0;
}
template <int Columns>
__device__ void deallocate(uint32_t) {}

__device__ inline void fence_before_sync() { __threadfence_block(); }
__device__ inline void fence_after_sync() { __threadfence_block(); }

// One operand of an MMA, from its descriptor.
struct Matrix {
  uint32_t start, leading, stride;  // bytes
  bool mn_major;

  __device__ Matrix(uint64_t descriptor, bool mn_major)
      : start(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)),
        mn_major(mn_major) {}

  __device__ static uint32_t field(uint64_t descriptor, int shift) {
    return uint32_t(descriptor >> shift & 0x3fff) << 4;
  }

  // Row `row` of A, or column of B; its bytes in the 128-byte swizzle.
  template <int Bytes>
  __device__ const uint8_t* at(int row, int k) const {
    constexpr int kWidth = 128 / Bytes;
    const uint32_t offset =
        mn_major ? row / kWidth * leading + k / 8 * stride + k % 8 * 128 + row % kWidth * Bytes
                 : row / 8 * stride + row % 8 * 128 + k * Bytes;
    const uint32_t address = start + offset;
    return static_cast<const uint8_t*>(
        __cvta_shared_to_generic(address ^ (address >> 7 & 7) << 4));
  }
};

// An element of a format, as instruction descriptors count those.
template <Kind kind>
__device__ float decode(const uint8_t* from, uint32_t format) {
  if constexpr (kind == Kind::f16) {
    uint16_t bits;
    memcpy(&bits, from, sizeof bits);
    if (format == 0) return __half2float(__ushort_as_half(bits));
    return __bfloat162float(__ushort_as_bfloat16(bits));
  } else {
    const auto half = __nv_cvt_fp8_to_halfraw(*from, format == 0 ? __NV_E4M3 : __NV_E5M2);
    return __half2float(__half(half));
  }
}

template <Kind kind>
__device__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  constexpr int kBytes = kind == Kind::f16 ? 2 : 1, kDepth = 32 / kBytes;
  const Matrix of_a(a, instruction >> 15 & 1), of_b(b, instruction >> 16 & 1);
  const uint32_t format_a = instruction >> 7 & 7, format_b = instruction >> 10 & 7;
  const int columns = int(instruction >> 17 & 63) * 8, rows = int(instruction >> 24 & 31) * 16;
  for (int row = int(threadIdx.x % 32); row < rows; row += 32) {
    float left[kDepth];
    for (int k = 0; k < kDepth; ++k) left[k] = decode<kind>(of_a.at<kBytes>(row, k), format_a);
    for (int column = 0; column < columns; ++column) {
      float& to = sum_at(d + (uint32_t(row) << 16) + column);
      float sum = add ? to : 0.f;
      for (int k = 0; k < kDepth; ++k) {
        sum += left[k] * decode<kind>(of_b.at<kBytes>(column, k), format_b);
      }
      to = sum;
    }
  }
  __syncwarp();
}

__device__ inline void commit(const Barrier& barrier) {
  __threadfence_block();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// A lane has two neighbours of every 8 columns in row lane / 4, and two in that row + 8.
template <int Count>
__device__ void load_strip(float (&to)[Count], uint32_t from) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = 0; i < Count; ++i) {
    const uint32_t row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    to[i] = sum_at(from + (row << 16) + column);
  }
}

}  // namespace fusegen::tcgen05

#endif  // FUSEGEN_TCGEN05
