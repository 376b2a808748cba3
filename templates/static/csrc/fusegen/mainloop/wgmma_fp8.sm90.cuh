// Warpgroup MMA on FP8 operands. Both are K-major: the hardware offers nothing else for 8 bits.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "fusegen/mainloop/wgmma.sm90.cuh"

namespace fusegen {

template <class A, class B>
struct Fp8WarpgroupMma {
  // One k32 step: the first `Used` waves, the first `Width` of N columns.
  template <int Used, int Width, int Waves, int N>
  static __device__ void step(Accumulators<Waves, N>& d, uint64_t a, uint64_t b,
                              ScaleOut scale = ScaleOut::One) {
    static_assert(Used <= Waves && Width <= N);
#pragma unroll
    for (int wave = 0; wave < Used; ++wave) {
      issue_mma<Width, A, B, Major::K, Major::K>(d.values[wave], a + wave * kRowStep, b, scale);
    }
  }
};

}  // namespace fusegen
