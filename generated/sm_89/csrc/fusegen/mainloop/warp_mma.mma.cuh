// mma.sync of a warp: one step multiplies 32 bytes of the contraction, whatever its elements are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fusegen {

inline constexpr int kStepBytes = 32;

// Operands of 16 bits: m16n8k16.
template <class Element>
struct WarpMma {
  static constexpr int kBits = 16;  // of an operand's element
  static_assert(sizeof(Element) * 8 == kBits);

  // d += a b: 16x16 by 16x8.
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      static_assert(std::is_same_v<Element, __half>);
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
};

}  // namespace fusegen
