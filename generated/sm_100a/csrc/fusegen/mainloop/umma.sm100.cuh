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

#include "fusegen/common/fp4.h"
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
  static constexpr int kBits = 16;
  static constexpr uint32_t kFormat = 0;
};
template <>
struct UmmaElement<__nv_bfloat16> {
  static constexpr int kBits = 16;
  static constexpr uint32_t kFormat = 1;
};
template <>
struct UmmaElement<__nv_fp8_e4m3> {
  static constexpr int kBits = 8;
  static constexpr uint32_t kFormat = 0;
};
template <>
struct UmmaElement<__nv_fp8_e5m2> {
  static constexpr int kBits = 8;
  static constexpr uint32_t kFormat = 1;
};
template <>
struct UmmaElement<__nv_fp4_e2m1> {  // of mxf4nvf4
  static constexpr int kBits = 4;
  static constexpr uint32_t kFormat = 1;
};

// Of an MMA with fp32 sums.
template <class A, class B>
constexpr uint32_t operand_bits(int rows, int columns, StageMajor a, StageMajor b) {
  return UmmaElement<A>::kFormat << 7 | UmmaElement<B>::kFormat << 10 |
         uint32_t(a == StageMajor::MN) << 15 | uint32_t(b == StageMajor::MN) << 16 |
         uint32_t(columns / 8) << 17 | uint32_t(rows / 16) << 24;
}
template <tcgen05::Kind kind, class A, class B>
constexpr uint32_t instruction_descriptor(int rows, int columns, StageMajor a, StageMajor b) {
  constexpr uint32_t kFp32 = 1, kPowersOfTwo = 1;
  const uint32_t operands = operand_bits<A, B>(rows, columns, a, b);
  switch (kind) {
    case tcgen05::Kind::f16:
    case tcgen05::Kind::f8f6f4: return operands | kFp32 << 4;
    case tcgen05::Kind::mxf8f6f4: return operands | kPowersOfTwo << 23;
    case tcgen05::Kind::mxf4nvf4: return operands;
  }
  return 0;
}

// Which byte of each row's word of scales an MMA of mxf8f6f4 reads, of both operands.
constexpr uint32_t scale_byte(uint32_t index) { return index << 4 | index << 29; }

// An atom of scales at a shared address: 8 rows of 16 bytes every 128 bytes, not swizzled.
constexpr uint64_t atom_descriptor(uint32_t address) {
  constexpr uint64_t kVersion = uint64_t(1) << 46;
  constexpr uint64_t kStride = uint64_t(8 * 16 / 16) << 32;
  return kVersion | kStride | (address >> 4 & 0x3fff);
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
template <StageMajor major, int Bits>
inline constexpr uint32_t kUmmaStep =
    major == StageMajor::K ? kMmaKBytes / 16 : kMmaKBytes * 8 / Bits * kSwizzleBytes / 16;

}  // namespace fusegen
