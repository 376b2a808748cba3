// What an MMA of tensor memory is told of its operands (PTX ISA, "tcgen05": "Shared memory
// descriptor", "Instruction descriptor").
//
// An operand tile is a row of boxes that TMA wrote with the 128-byte swizzle, each 128 bytes wide:
//   K-major:  the tile's rows, one stage of K wide; 8 rows are 1024 bytes.
//   MN-major: boxes of all of a stage's K, each row 128 bytes of M or N.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "fusegen/load/stage.cuh"
#include "fusegen/mainloop/tcgen05.sm100.cuh"

namespace fusegen {

inline constexpr int kSwizzleBytes = 128;  // one row of the swizzle
inline constexpr int kMmaKBytes = 32;      // the contraction of one MMA in K-major bytes

// What an element type is called in the descriptor of its kind of MMA.
template <class Element>
struct UmmaElement;
template <>
struct UmmaElement<__half> {
  static constexpr tcgen05::Kind kKind = tcgen05::Kind::f16;
  static constexpr uint32_t kFormat = 0;
};
template <>
struct UmmaElement<__nv_bfloat16> {
  static constexpr tcgen05::Kind kKind = tcgen05::Kind::f16;
  static constexpr uint32_t kFormat = 1;
};
template <>
struct UmmaElement<__nv_fp8_e4m3> {
  static constexpr tcgen05::Kind kKind = tcgen05::Kind::f8f6f4;
  static constexpr uint32_t kFormat = 0;
};
template <>
struct UmmaElement<__nv_fp8_e5m2> {
  static constexpr tcgen05::Kind kKind = tcgen05::Kind::f8f6f4;
  static constexpr uint32_t kFormat = 1;
};

// Of an MMA with fp32 sums.
template <class A, class B>
constexpr uint32_t instruction_descriptor(int rows, int columns, StageMajor a, StageMajor b) {
  static_assert(UmmaElement<A>::kKind == UmmaElement<B>::kKind, "one kind of MMA");
  constexpr uint32_t kFp32 = 1;
  return kFp32 << 4 | UmmaElement<A>::kFormat << 7 | UmmaElement<B>::kFormat << 10 |
         uint32_t(a == StageMajor::MN) << 15 | uint32_t(b == StageMajor::MN) << 16 |
         uint32_t(columns / 8) << 17 | uint32_t(rows / 16) << 24;
}

// Of an operand tile at a shared address; `K` is a stage's contraction. The stride offset steps over
// 8 rows, the leading offset, which K-major tiles have no use for, from one box to the next.
template <StageMajor major, int K>
constexpr uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t(2) << 61;
  constexpr uint64_t kVersion = uint64_t(1) << 46;
  constexpr uint64_t kStride = uint64_t(8 * kSwizzleBytes / 16) << 32;
  constexpr uint64_t kLeading = uint64_t(major == StageMajor::MN ? K * kSwizzleBytes / 16 : 1)
                                << 16;
  return kSwizzle128 | kVersion | kStride | kLeading | (address >> 4 & 0x3fff);
}

// From one MMA of a stage to the next, in the 16-byte units of a matrix descriptor.
template <StageMajor major, int ElementBytes>
inline constexpr uint32_t kUmmaStep = major == StageMajor::K
                                          ? kMmaKBytes / 16
                                          : kMmaKBytes / ElementBytes * kSwizzleBytes / 16;

}  // namespace fusegen
