// The MMA of a warpgroup, whose operands lie in shared memory (PTX ISA, "wgmma").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace fusegen {

enum class Major { K, MN };  // the dimension along which an operand's elements are neighbours

enum class ScaleOut { Zero, One };  // of the accumulators: Zero overwrites them

// Between what threads did to accumulators and shared memory, and an MMA that reads them.
__device__ inline void fence_mmas() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving an accumulator across the asynchronous MMA.
__device__ inline void fence_register(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// The MMAs since the last call are a group.
__device__ inline void commit_mmas() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all but the last `Left` groups have ended.
template <int Left>
__device__ void wait_for_mmas() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Accumulators in the text of an instruction, ten at a time, and as its operands.
#define FUSEGEN_TEN(n)                                                                            \
  "%" #n "0, %" #n "1, %" #n "2, %" #n "3, %" #n "4, %" #n "5, %" #n "6, %" #n "7, %" #n "8, "    \
  "%" #n "9, "
#define FUSEGEN_30 FUSEGEN_TEN() FUSEGEN_TEN(1) FUSEGEN_TEN(2)
#define FUSEGEN_60 FUSEGEN_30 FUSEGEN_TEN(3) FUSEGEN_TEN(4) FUSEGEN_TEN(5)
#define FUSEGEN_90 FUSEGEN_60 FUSEGEN_TEN(6) FUSEGEN_TEN(7) FUSEGEN_TEN(8)
#define FUSEGEN_120 FUSEGEN_90 FUSEGEN_TEN(9) FUSEGEN_TEN(10) FUSEGEN_TEN(11)
#define FUSEGEN_FOUR_OF(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FUSEGEN_16_OF(i)                                                                          \
  FUSEGEN_FOUR_OF(i), FUSEGEN_FOUR_OF(i + 4), FUSEGEN_FOUR_OF(i + 8), FUSEGEN_FOUR_OF(i + 12)
#define FUSEGEN_32_OF(i) FUSEGEN_16_OF(i), FUSEGEN_16_OF(i + 16)

// One size: the accumulators' numbers, then those of the operands, of `scale` and of the two majors,
// which 16-bit formats name.
#define FUSEGEN_MMA(SIZE, FORMATS, NUMBERS, A, B, SCALE, MAJORS, ...)                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " SCALE ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64" SIZE ".f32." FORMATS " {" NUMBERS "}, " A ", " B\
               ", add, 1, 1" MAJORS ";\n}"                                                        \
               : __VA_ARGS__                                                                      \
               : "l"(a), "l"(b), "r"(int32_t(scale)), "n"(int32_t(major_a)), "n"(int32_t(major_b)))
#define FUSEGEN_MMAS(K, FORMATS, MAJORS)                                                          \
  if constexpr (N == 64) {                                                                        \
    FUSEGEN_MMA("n64" K, FORMATS, FUSEGEN_30 "%30, %31", "%32", "%33", "%34", MAJORS(35, 36),     \
                FUSEGEN_32_OF(0));                                                                \
  } else if constexpr (N == 128) {                                                                \
    FUSEGEN_MMA("n128" K, FORMATS, FUSEGEN_60 "%60, %61, %62, %63", "%64", "%65", "%66",          \
                MAJORS(67, 68), FUSEGEN_32_OF(0), FUSEGEN_32_OF(32));                             \
  } else if constexpr (N == 192) {                                                                \
    FUSEGEN_MMA("n192" K, FORMATS, FUSEGEN_90 "%90, %91, %92, %93, %94, %95", "%96", "%97",       \
                "%98", MAJORS(99, 100), FUSEGEN_32_OF(0), FUSEGEN_32_OF(32), FUSEGEN_32_OF(64));  \
  } else {                                                                                        \
    FUSEGEN_MMA("n256" K, FORMATS,                                                                \
                FUSEGEN_120 "%120, %121, %122, %123, %124, %125, %126, %127", "%128", "%129",     \
                "%130", MAJORS(131, 132), FUSEGEN_32_OF(0), FUSEGEN_32_OF(32),                    \
                FUSEGEN_32_OF(64), FUSEGEN_32_OF(96));                                            \
  }
#define FUSEGEN_MAJORS(A, B) ", %" #A ", %" #B
#define FUSEGEN_K_MAJOR(A, B) ""

// d += a b, or d = a b: 64 rows by N columns, whose accumulators are N / 2 registers of a thread; a
// and b are descriptors (mainloop/wgmma.sm90.cuh) of 32 bytes of K. Operands of 8 bits are K-major.
template <int N, class A, class B, Major major_a, Major major_b>
__device__ void issue_mma(float* d, uint64_t a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  static_assert(N == 64 || N == 128 || N == 192 || N == 256);
  constexpr bool kE4m3A = std::is_same_v<A, __nv_fp8_e4m3>;
  constexpr bool kE4m3B = std::is_same_v<B, __nv_fp8_e4m3>;
  if constexpr (sizeof(A) == 1) {
    static_assert(kE4m3A || std::is_same_v<A, __nv_fp8_e5m2>);
    static_assert(kE4m3B || std::is_same_v<B, __nv_fp8_e5m2>);
    static_assert(major_a == Major::K && major_b == Major::K);
  } else {
    static_assert(std::is_same_v<A, __nv_bfloat16> || std::is_same_v<A, __half>);
    static_assert(std::is_same_v<A, B>);
  }
  if constexpr (std::is_same_v<A, __nv_bfloat16>) {
    FUSEGEN_MMAS("k16", "bf16.bf16", FUSEGEN_MAJORS)
  } else if constexpr (std::is_same_v<A, __half>) {
    FUSEGEN_MMAS("k16", "f16.f16", FUSEGEN_MAJORS)
  } else if constexpr (kE4m3A && kE4m3B) {
    FUSEGEN_MMAS("k32", "e4m3.e4m3", FUSEGEN_K_MAJOR)
  } else if constexpr (kE4m3A) {
    FUSEGEN_MMAS("k32", "e4m3.e5m2", FUSEGEN_K_MAJOR)
  } else if constexpr (kE4m3B) {
    FUSEGEN_MMAS("k32", "e5m2.e4m3", FUSEGEN_K_MAJOR)
  } else {
    FUSEGEN_MMAS("k32", "e5m2.e5m2", FUSEGEN_K_MAJOR)
  }
}

#undef FUSEGEN_TEN
#undef FUSEGEN_30
#undef FUSEGEN_60
#undef FUSEGEN_90
#undef FUSEGEN_120
#undef FUSEGEN_FOUR_OF
#undef FUSEGEN_16_OF
#undef FUSEGEN_32_OF
#undef FUSEGEN_MMA
#undef FUSEGEN_MMAS
#undef FUSEGEN_MAJORS
#undef FUSEGEN_K_MAJOR

}  // namespace fusegen
