// mma.sync of operands with scales: a byte for each 32 elements of 8 bits, E8M0, or for each 16 of 4
// bits, E4M3. Where there is no such instruction, its twin: decoded elements, which bf16 holds exactly
// wherever they are within its range, through the MMA of 16 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "fusegen/mainloop/warp_mma.mma.cuh"
#include "fusegen/quantize/math.cuh"

namespace fusegen {

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM120_ALL)
inline constexpr bool kBlockScaledMma = false;
#else
inline constexpr bool kBlockScaledMma = true;
#endif

// What the twin of an instruction needs: elements of a register of codes, times their scale.
template <class Format>
struct TwinOperand {
  // Elements 2 p and 2 p + 1.
  __device__ static uint32_t decoded(uint32_t codes, int p, float scale) {
    constexpr uint32_t kCode = (1u << Format::kBits) - 1;
    const float low = decode<Format>(codes >> (2 * p * Format::kBits) & kCode);
    const float high = decode<Format>(codes >> ((2 * p + 1) * Format::kBits) & kCode);
    return bfloat16_pair(low * scale, high * scale);
  }
};

// Element pairs of a register one after the other: both operands' contractions are permuted alike.
template <class A, class B, class ScaleOf>
__device__ void multiply_twin(float* d, const uint32_t (&a)[4], const uint32_t* b, uint32_t scale_a,
                              uint32_t scale_b, ScaleOf scale_of) {
  constexpr uint32_t kAll = 0xffffffffu;
  const uint32_t first = threadIdx.x % 32 & ~3u;
  const uint32_t rows[2] = {__shfl_sync(kAll, scale_a, first), __shfl_sync(kAll, scale_a, first + 1)};
  const uint32_t columns = __shfl_sync(kAll, scale_b, first);
#pragma unroll
  for (int p = 0; p < 16 / A::kBits; ++p) {
    uint32_t x[4], y[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = TwinOperand<A>::decoded(a[i], p, scale_of(rows[i % 2], i / 2));
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = TwinOperand<B>::decoded(b[i], p, scale_of(columns, i));
    WarpMma<__nv_bfloat16>::multiply_add(d, x, y);
  }
}

template <class Code>
struct CodeFormat;
template <>
struct CodeFormat<__nv_fp8_e4m3> {
  using Format = E4M3;
};
template <>
struct CodeFormat<__nv_fp8_e5m2> {
  using Format = E5M2;
};

// m16n8k32, a scale for all of its contraction.
template <class A, class B>
struct MxWarpMma {
  static constexpr int kBits = 8;        // of an operand's element
  static constexpr int kBlock = 32;      // elements of a scale
  static constexpr int kStepBlocks = 1;  // of one MMA
  static constexpr bool kWideA = std::is_same_v<A, __nv_fp8_e5m2>;
  static constexpr bool kWideB = std::is_same_v<B, __nv_fp8_e5m2>;

  // d += a b: 16x32 by 32x8. Scales are in the lowest bytes, of row q in lane 4 q, of row q + 8 in
  // lane 4 q + 1, of column q in lane 4 q.
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b,
                                      uint32_t scale_a, uint32_t scale_b) {
    if constexpr (!kBlockScaledMma) {
      using FormatA = typename CodeFormat<A>::Format;
      using FormatB = typename CodeFormat<B>::Format;
      multiply_twin<FormatA, FormatB>(d, a, b, scale_a, scale_b,
                                      [](uint32_t scale, int) { return e8m0_value(scale & 0xff); });
    } else if constexpr (!kWideA && !kWideB) {
      asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
    } else if constexpr (!kWideA) {
      asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e5m2.f32.ue8m0"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
    } else if constexpr (!kWideB) {
      asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e5m2.e4m3.f32.ue8m0"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
    } else {
      asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e5m2.e5m2.f32.ue8m0"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
    }
  }
};

// m16n8k64 of E2M1, four scales along its contraction.
struct NvWarpMma {
  static constexpr int kBits = 4;
  static constexpr int kBlock = 16;
  static constexpr int kStepBlocks = 4;

  // d += a b: 16x64 by 64x8. Scales are words, of the same lanes as those of MxWarpMma.
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b,
                                      uint32_t scale_a, uint32_t scale_b) {
    if constexpr (!kBlockScaledMma) {
      const uint32_t own = threadIdx.x % 4 / 2 * 8;  // of 32 elements of a register's four lanes
      multiply_twin<E2M1, E2M1>(d, a, b, scale_a, scale_b, [&](uint32_t scales, int half) {
        return decode<E4M3>(scales >> (half * 16 + own) & 0xff);
      });
    } else {
      asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
    }
  }
};

}  // namespace fusegen
