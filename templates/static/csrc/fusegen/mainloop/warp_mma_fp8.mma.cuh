// mma.sync of FP8 operands, for sm_89 and later: m16n8k32. Its sums have no more than 14 bits on Ada
// and on Hopper.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace fusegen {

template <class A, class B>
struct Fp8WarpMma {
  static constexpr int kBits = 8;  // of an operand's element
  static constexpr bool kWideA = std::is_same_v<A, __nv_fp8_e5m2>;
  static constexpr bool kWideB = std::is_same_v<B, __nv_fp8_e5m2>;
  static_assert(kWideA || std::is_same_v<A, __nv_fp8_e4m3>);
  static_assert(kWideB || std::is_same_v<B, __nv_fp8_e4m3>);

  // d += a b: 16x32 by 32x8.
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b) {
    if constexpr (!kWideA && !kWideB) {
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else if constexpr (!kWideA) {
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else if constexpr (!kWideB) {
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
};

}  // namespace fusegen
