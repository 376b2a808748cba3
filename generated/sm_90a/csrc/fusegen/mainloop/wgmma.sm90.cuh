// Warpgroup MMA on operand tiles that TMA wrote with the 128-byte swizzle.
//
// An operand tile is a row of boxes, each one swizzle atom (128 bytes, 64 elements) wide:
//   K-major:  one box of all rows, 64 elements of K wide; 8 rows are 1024 bytes.
//   MN-major: boxes of 64 rows of K, each row 64 elements of M or N; one box is 8192 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "fusegen/common/instructions.sm90.cuh"
#include "fusegen/fragment/fragment.cuh"
#include "fusegen/mainloop/wgmma_instructions.sm90.cuh"

namespace fusegen {

inline constexpr int kSwizzleBytes = 128;  // one row of the swizzle
inline constexpr int kMmaRows = 64;        // rows of one warpgroup MMA
inline constexpr int kMmaKBytes = 32;  // its contraction length in K-major bytes

// Matrix descriptor of an operand tile (PTX ISA, "Matrix Descriptor Format"). The stride offset
// steps over 8 rows of the slow dimension; the leading offset is read for MN-major tiles alone,
// where it steps from one box to the next. Above its 14 address bits a shared address may carry
// the CTA's rank in the cluster, which must not reach the neighbouring field.
template <Major major, int K>
__device__ uint64_t operand_descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  constexpr uint64_t kStride = uint64_t(1024 / 16) << 32;
  constexpr uint64_t kLeading =
      uint64_t(major == Major::MN ? K * 128 / 16 : 1) << 16;
  return kSwizzle128 | kStride | kLeading | (shared_address(tile) >> 4 & 0x3fff);
}

// Descriptor steps, in 16-byte units.
template <Major major>
inline constexpr uint32_t kKStep = major == Major::K ? kMmaKBytes / 16 : 16 * 128 / 16;
inline constexpr uint32_t kRowStep = kMmaRows * 128 / 16;  // the same for both: 64 rows or one box

// Accumulators of one warpgroup: `Waves` MMAs of 64 rows by N columns.
template <int Waves, int N>
struct Accumulators {
  using Values = Fragment<N, Waves, kMmaRows>;  // what one warp holds of them
  static constexpr int kCount = N / 2;
  float values[Waves][kCount];

  __device__ void clear() {
#pragma unroll
    for (int wave = 0; wave < Waves; ++wave) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[wave][i] = 0.f;
    }
  }

  __device__ Values fragment(uint32_t lane) { return {values, lane}; }

  // `Width` columns of one wave: in the register file they are neighbours.
  template <int Width>
  __device__ Accumulators<1, Width>& part(int index) {
    static_assert(Waves == 1 && N % Width == 0);
    return reinterpret_cast<Accumulators<1, Width>&>(values[0][index * (Width / 2)]);
  }

  __device__ void fence() {
#pragma unroll
    for (int wave = 0; wave < Waves; ++wave) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) fence_register(values[wave][i]);
    }
  }
};

template <class Element, Major major_a, Major major_b>
struct WarpgroupMma {
  // One k16 step: the first `Used` waves, the first `Width` of N columns.
  template <int Used, int Width, int Waves, int N>
  static __device__ void step(Accumulators<Waves, N>& d, uint64_t a, uint64_t b) {
    static_assert(Used <= Waves && Width <= N);
#pragma unroll
    for (int wave = 0; wave < Used; ++wave) {
      issue_mma<Width, Element, Element, major_a, major_b>(d.values[wave], a + wave * kRowStep, b);
    }
  }
};

}  // namespace fusegen
