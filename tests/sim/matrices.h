// Warpgroup MMAs on operands in shared memory, stmatrix and ldmatrix (PTX ISA: wgmma.mma_async).
// An MMA reads its operands as late as it may, when it is waited for, so that a stage given away
// too early shows. Sums are exact within an MMA and fp32 from one to the next; the shorter
// accumulation of 8-bit products by the tensor cores is not modelled.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>

#include "copies.h"

namespace sim {

enum class Format { e4m3, e5m2, bf16, f16, e2m1 };

constexpr int bits_of(Format format) {
  return format == Format::e2m1 ? 4 : format <= Format::e5m2 ? 8 : 16;
}
constexpr int bytes_of(Format format) { return bits_of(format) / 8; }

template <class Code>
std::array<float, 256> decoded_codes() {
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) {
    Code code;
    code.__x = __nv_fp8_storage_t(i);
    values[size_t(i)] = float(code);
  }
  return values;
}

template <class Code>
inline const std::array<float, 256> kDecoded = decoded_codes<Code>();

inline float decode(const uint8_t* from, Format format) {
  switch (format) {
    case Format::e4m3: return kDecoded<__nv_fp8_e4m3>[*from];
    case Format::e5m2: return kDecoded<__nv_fp8_e5m2>[*from];
    case Format::bf16: return __bfloat162float(read_as<__nv_bfloat16>(from));
    case Format::f16: return __half2float(read_as<__half>(from));
    case Format::e2m1: {  // in the lower half
      constexpr float kSizes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
      return (*from & 8) != 0 ? -kSizes[*from & 7] : kSizes[*from & 7];
    }
  }
  return 0;
}

// One operand of an MMA, from its matrix descriptor. `mn_major`: the contraction is the slow
// dimension.
struct MmaOperand {
  uint32_t start, leading, stride;  // bytes
  bool mn_major;
  Format format;

  MmaOperand(uint64_t descriptor, bool mn_major, Format format)
      : start(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)),
        mn_major(mn_major),
        format(format) {
    if (descriptor >> 46 != uint64_t(1) << 16) fail("a descriptor without the 128-byte swizzle");
  }

  static uint32_t field(uint64_t descriptor, int shift) {
    return uint32_t(descriptor >> shift & 0x3fff) << 4;
  }

  // `row` of A, or column of B.
  float at(const uint8_t* memory, int row, int k) const {
    const int bytes = bytes_of(format);
    const uint32_t offset =
        mn_major ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * bytes
                 : row / 8 * stride + row % 8 * 128 + k * bytes;
    const uint32_t address = swizzled(start + offset);
    if (address >= kSharedBytes) fail("an MMA that reads beyond shared memory");
    return decode(memory + address, format);
  }
};

inline Batches mmas[kMostCtas * kMostThreads];

// This thread's part of a 64 x N result: per 8 columns two neighbours in each of two rows.
template <int N>
void multiply(const MmaOperand& a, const MmaOperand& b, const std::array<float*, N / 2>& d,
              bool overwrite, int thread_of_warpgroup, const uint8_t* memory) {
  constexpr int kMostK = 32;
  const int length = 32 / bytes_of(a.format);
  const int row = thread_of_warpgroup / 32 * 16 + thread_of_warpgroup % 32 / 4;
  float rows[2][kMostK];
  for (int k = 0; k < length; ++k) {
    rows[0][k] = a.at(memory, row, k);
    rows[1][k] = a.at(memory, row + 8, k);
  }
  for (int i = 0; i < N / 4; ++i) {
    const int column = i / 2 * 8 + thread_of_warpgroup % 4 * 2 + i % 2;
    double sums[2] = {};
    for (int k = 0; k < length; ++k) {
      const double factor = b.at(memory, column, k);
      sums[0] += rows[0][k] * factor;
      sums[1] += rows[1][k] * factor;
    }
    for (int half = 0; half < 2; ++half) {
      float& out = *d[size_t(i / 2 * 4 + half * 2 + i % 2)];
      out = float(overwrite ? sums[half] : out + sums[half]);
    }
  }
}

template <int N>
void issue_mma(const MmaOperand& a, const MmaOperand& b, const std::array<float*, N / 2>& d,
               bool overwrite) {
  mmas[cluster.current].add([=, thread = thread() % 128, memory = shared_memory()] {
    multiply<N>(a, b, d, overwrite, thread, memory);
  });
}

// Warps are in step before and after, as the warp-wide instruction has them.
inline void wait_for_mmas(size_t left) {
  sync_warp();
  mmas[cluster.current].finish_all_but(left);
  sync_warp();
}

// stmatrix.x4: lane 8 i + r gives the address of row r of matrix i.
inline void store_matrices(uint32_t address, const std::array<uint32_t, 4>& values) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = shuffle(address, i * 8 + lane() / 4);
    uint8_t* const to = shared_pointer(row, 16) + lane() % 4 * 4;
    std::memcpy(to, &values[size_t(i)], sizeof values[0]);
  }
  sync_warp();
}

// ldmatrix.x4: the other way.
inline void load_matrices(uint32_t address, uint32_t (&values)[4]) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = shuffle(address, i * 8 + lane() / 4);
    std::memcpy(&values[i], shared_pointer(row, 16) + lane() % 4 * 4, sizeof values[i]);
  }
}

// movmatrix.trans: lane 4 i + j gives elements 2 j and 2 j + 1 of row i, and gets those of column i.
inline uint32_t transposed_matrix(uint32_t row) {
  const uint64_t* const rows = exchange(row);
  const int column = lane() / 4;
  uint32_t out = 0;
  for (int i = 0; i < 2; ++i) {
    const uint64_t pair = rows[(lane() % 4 * 2 + i) * 4 + column / 2];
    out |= uint32_t(pair >> column % 2 * 16 & 0xffff) << i * 16;
  }
  return out;
}

}  // namespace sim
