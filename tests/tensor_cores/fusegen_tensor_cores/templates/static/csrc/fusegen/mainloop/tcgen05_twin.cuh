// The functions of mainloop/tcgen05.sm100.cuh in software, for GPUs from sm_90 on and for the CPU.
//
// Tensor memory lies in global memory, and a warp multiplies what the matrix descriptors and the
// instruction descriptor name, field by field as the PTX ISA has them: on a GPU by its MMA of 16
// bits, of codes that are decoded and scaled, on the CPU element by element. This is slow; loads,
// barriers, groups, visitors and stores around it are the real ones.
#ifndef FUSEGEN_TCGEN05
#define FUSEGEN_TCGEN05

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#ifdef __CUDACC__
#include <cuda/ptx>

#include "fusegen/mainloop/warp_mma.mma.cuh"
#endif

#include <cstdint>
#include <cstring>

#include "fusegen/load/ring.sm90.cuh"

namespace fusegen::tcgen05 {

enum class Kind { f16, f8f6f4, mxf8f6f4, mxf4nvf4 };

// Of an SM, as the real one: stages leave no room for a second CTA on it, so that launches which
// run at a time have memory of their own, too. Rows of a column lie side by side, where a warp's
// lanes read and write them together.
inline constexpr uint32_t kMostSms = 160;
inline constexpr uint32_t kLanes = 128, kColumns = 512;
struct TensorMemory {
  uint32_t* address;  // where the CTA keeps the address of what it has been given
  float sums[kColumns][kLanes];
};

// In a function of the device, so that libraries have no image of it for the host, which has room
// for 2 GiB of them.
__device__ inline TensorMemory& memory_of(uint32_t sm) {
  static TensorMemory memory[kMostSms];
  return memory[sm];
}

// On the CPU every CTA has an SM.
__device__ inline uint32_t this_sm() {
#ifdef __CUDA_ARCH__
  return cuda::ptx::get_sreg_smid();
#else
  return blockIdx.x;
#endif
}

// An address has the column in its lower half and the lane in the upper one, and above that, where
// the hardware's has nothing, the SM.
inline constexpr int kLaneAt = 16, kSmAt = 23;

template <int Columns, int Ctas>
__device__ void allocate(uint32_t* to) {
  static_assert(Columns >= 32 && Columns <= int(kColumns) && (Columns & (Columns - 1)) == 0);
  const uint32_t sm = this_sm();
#ifdef __CUDA_ARCH__
  if (sm >= kMostSms) __trap();
#endif
  memory_of(sm).address = to;
  *to = sm << kSmAt;
}

__device__ inline float& sum_at(uint32_t address) {
  return memory_of(address >> kSmAt).sums[address & 0xffff][address >> kLaneAt & (kLanes - 1)];
}

// An address of this CTA's, in the memory of the CTA `rank` of its pair.
template <int Ctas>
__device__ uint32_t of_rank(uint32_t address, uint32_t rank) {
  if constexpr (Ctas == 1) {
    return address;
  } else {
    const void* const own = memory_of(this_sm()).address;
    const uint32_t base = *static_cast<const uint32_t*>(__cluster_map_shared_rank(own, rank));
    return base | (address & ((1u << kSmAt) - 1));
  }
}

template <int Columns, int Ctas>
__device__ void deallocate(uint32_t) {}

// A pair's memory is written by one CTA and read by two, which no fence of a block would order.
__device__ inline void fence_before_sync() { __threadfence(); }
__device__ inline void fence_after_sync() { __threadfence(); }

constexpr int bits_of(Kind kind) {
  return kind == Kind::f16 ? 16 : kind == Kind::mxf4nvf4 ? 4 : 8;
}

// Of the CTA `rank` of a pair; a descriptor's address is the same in both.
template <int Ctas>
__device__ const uint8_t* in_shared_memory(uint32_t address, uint32_t rank) {
  const void* const own = __cvta_shared_to_generic(address);
  if constexpr (Ctas == 1) {
    return static_cast<const uint8_t*>(own);
  } else {
    return static_cast<const uint8_t*>(__cluster_map_shared_rank(own, rank));
  }
}

// One operand of an MMA, from its descriptor; of a pair the part of it that one CTA has.
template <Kind kind, int Ctas>
struct Matrix {
  static constexpr int kBits = bits_of(kind), kWidth = 1024 / kBits;

  uint32_t start, leading, stride;  // bytes
  bool mn_major;
  uint32_t format;  // as instruction descriptors count them

  __device__ Matrix(uint64_t descriptor, bool mn_major, uint32_t format)
      : start(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)),
        mn_major(mn_major),
        format(format) {}

  __device__ static uint32_t field(uint64_t descriptor, int shift) {
    return uint32_t(descriptor >> shift & 0x3fff) << 4;
  }

  // Row `row` of A, or column of B, of those that the CTA `rank` has; in the 128-byte swizzle.
  __device__ float at(uint32_t rank, int row, int k) const {
    const uint32_t offset = mn_major ? row / kWidth * leading + k / 8 * stride + k % 8 * 128 +
                                           row % kWidth * kBits / 8
                                     : row / 8 * stride + row % 8 * 128 + k * kBits / 8;
    const uint32_t address = start + offset;
    return decode(in_shared_memory<Ctas>(address ^ (address >> 7 & 7) << 4, rank), k);
  }

 private:
  __device__ float decode(const uint8_t* from, int k) const {
    if constexpr (kBits == 16) {
      uint16_t bits;
      memcpy(&bits, from, sizeof bits);
      if (format == 0) return __half2float(__ushort_as_half(bits));
      return __bfloat162float(__ushort_as_bfloat16(bits));
    } else if constexpr (kBits == 8) {
      return decode_fp8(*from, format == 0 ? __NV_E4M3 : __NV_E5M2);
    } else {  // 0 .5 1 1.5 2 3 4 6, the even element first
      const uint32_t code = *from >> k % 2 * 4, exponent = code >> 1 & 3;
      const float mantissa = 0.5f * float(code & 1);
      const float size =
          exponent == 0 ? mantissa : float(1u << (exponent - 1)) * (1.f + mantissa);
      return code & 8 ? -size : size;
    }
  }

 public:
  __device__ static float decode_fp8(uint8_t code, __nv_fp8_interpretation_t format) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, format)));
  }
};

// The scales of one operand, four bytes of each row, in tensor memory.
template <Kind kind, int Ctas>
struct ScaleWords {
  uint32_t address, byte;

  __device__ float at(int row, int k) const {
    if constexpr (kind == Kind::mxf8f6f4 || kind == Kind::mxf4nvf4) {
      const uint32_t place = address + (uint32_t(row % 32) << kLaneAt) + row / 32;
      const uint32_t word = __float_as_uint(sum_at(place));
      if constexpr (kind == Kind::mxf8f6f4) {
        const uint32_t exponent = word >> byte * 8 & 255;
        return __uint_as_float(exponent == 0 ? 1u << 22 : exponent << 23);
      } else {
        return Matrix<kind, Ctas>::decode_fp8(uint8_t(word >> k / 16 * 8), __NV_E4M3);
      }
    } else {
      return 1.f;
    }
  }
};

// Both operands of an MMA. Rows follow each other from CTA to CTA of a pair, and so do columns of B.
template <Kind kind, int Ctas>
struct Operands {
  static constexpr int kDepth = 256 / bits_of(kind);

  Matrix<kind, Ctas> a, b;
  int rows, columns;  // of each CTA
  uint32_t instruction, scale_a, scale_b;

  __device__ Operands(uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a,
                      uint32_t scale_b)
      : a(a, instruction >> 15 & 1, instruction >> 7 & 7),
        b(b, instruction >> 16 & 1, instruction >> 10 & 7),
        rows(int(instruction >> 24 & 31) * 16 / Ctas),
        columns(int(instruction >> 17 & 63) * 8 / Ctas),
        instruction(instruction),
        scale_a(scale_a),
        scale_b(scale_b) {}

  // Of a row of the CTA `rank`.
  __device__ float of_a(uint32_t rank, int row, int k) const {
    const ScaleWords<kind, Ctas> scales{of_rank<Ctas>(scale_a, rank), instruction >> 29 & 3};
    return a.at(rank, row, k) * scales.at(row, k);
  }

  // Of a column of either CTA, as it meets the rows of the CTA `rank`: each has scales of all
  // columns.
  __device__ float of_b(uint32_t rank, int column, int k) const {
    const ScaleWords<kind, Ctas> scales{of_rank<Ctas>(scale_b, rank), instruction >> 4 & 3};
    return b.at(uint32_t(column / columns), column % columns, k) * scales.at(column, k);
  }
};

#ifdef __CUDA_ARCH__
// The rows of the CTA `rank` by all columns, 16 by 8 at a time. bf16 holds products of codes and
// their scales. Sums of several columns are read together, since they lie far away.
template <class Element, Kind kind, int Ctas>
__device__ void multiply_rows(uint32_t rank, uint32_t d, const Operands<kind, Ctas>& of, bool add) {
  constexpr int kSteps = Operands<kind, Ctas>::kDepth / 16, kTogether = kSteps > 2 ? 4 : 8;
  const int line = int(threadIdx.x % 32 / 4), pair = int(threadIdx.x % 4 * 2);
  const auto packed = [](float first, float second) {
    const Element both[2] = {Element(first), Element(second)};
    uint32_t word;
    memcpy(&word, both, sizeof word);
    return word;
  };
  for (int column = 0; column < of.columns * Ctas; column += 8 * kTogether) {
    const int count = min(kTogether, (of.columns * Ctas - column) / 8);
    uint32_t right[kTogether][kSteps][2] = {};
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (t >= count) break;
      for (int i = 0; i < 2 * kSteps; ++i) {
        const int k = i * 8 + pair, at = column + t * 8 + line;
        right[t][i / 2][i % 2] = packed(of.of_b(rank, at, k), of.of_b(rank, at, k + 1));
      }
    }
    for (int row = 0; row < of.rows; row += 16) {
      uint32_t left[kSteps][4];
      for (int i = 0; i < 4 * kSteps; ++i) {
        const int k = i / 2 * 8 + pair, at = row + line + i % 2 * 8;
        left[i / 4][i % 4] = packed(of.of_a(rank, at, k), of.of_a(rank, at, k + 1));
      }
      const auto sum = [&](int t, int i) -> float& {
        const uint32_t lane = uint32_t(row + line + i / 2 * 8);
        return sum_at(d + (lane << kLaneAt) + uint32_t(column + t * 8 + pair + i % 2));
      };
      float sums[kTogether][4] = {};
#pragma unroll
      for (int i = 0; i < kTogether * 4; ++i) {
        if (add && i / 4 < count) sums[i / 4][i % 4] = sum(i / 4, i % 4);
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        for (int s = 0; s < kSteps; ++s) WarpMma<Element>::multiply_add(sums[t], left[s], right[t][s]);
      }
#pragma unroll
      for (int i = 0; i < kTogether * 4; ++i) {
        if (i / 4 < count) sum(i / 4, i % 4) = sums[i / 4][i % 4];
      }
    }
  }
}
#else
template <class, Kind kind, int Ctas>
__device__ void multiply_rows(uint32_t rank, uint32_t d, const Operands<kind, Ctas>& of, bool add) {
  constexpr int kDepth = Operands<kind, Ctas>::kDepth;
  for (int row = int(threadIdx.x % 32); row < of.rows; row += 32) {
    float left[kDepth];
    for (int k = 0; k < kDepth; ++k) left[k] = of.of_a(rank, row, k);
    for (int column = 0; column < of.columns * Ctas; ++column) {
      float& to = sum_at(d + (uint32_t(row) << kLaneAt) + uint32_t(column));
      float sum = add ? to : 0.f;
      for (int k = 0; k < kDepth; ++k) sum += left[k] * of.of_b(rank, column, k);
      to = sum;
    }
  }
}
#endif

template <Kind kind, int Ctas>
__device__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add,
                         uint32_t scale_a = 0, uint32_t scale_b = 0) {
  const Operands<kind, Ctas> of(a, b, instruction, scale_a, scale_b);
  for (uint32_t rank = 0; rank < Ctas; ++rank) {
    const uint32_t to = of_rank<Ctas>(d, rank);
    bool halves = false;
    if constexpr (kind == Kind::f16) halves = of.a.format == 0;
    if (halves) {
      multiply_rows<__half>(rank, to, of, add);
    } else {
      multiply_rows<__nv_bfloat16>(rank, to, of, add);
    }
  }
  __syncwarp();
}

// 32 rows of 16 bytes, 8 rows as far apart as the stride offset says, into 4 columns of each 32 lanes;
// of a pair each CTA's own into its own.
template <int Ctas>
__device__ void copy_atom(uint32_t to, uint64_t from) {
  using Fields = Matrix<Kind::f8f6f4, Ctas>;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t start = Fields::field(from, 0), stride = Fields::field(from, 32);
  for (uint32_t rank = 0; rank < Ctas; ++rank) {
    const uint8_t* const row =
        in_shared_memory<Ctas>(start + lane / 8 * stride + lane % 8 * 16, rank);
    for (uint32_t i = 0; i < 4; ++i) {
      float word;
      memcpy(&word, row + 4 * i, sizeof word);
      for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        sum_at(of_rank<Ctas>(to, rank) + ((quarter * 32 + lane) << kLaneAt) + i) = word;
      }
    }
  }
  __syncwarp();
}

template <int Ctas>
__device__ void commit(const Barrier& barrier) {
  __threadfence();
  __syncwarp();
  if constexpr (Ctas == 1) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  } else {
    if (threadIdx.x % 32 < Ctas) barrier.arrive(threadIdx.x % 32);
  }
}

// A lane has two neighbours of every 8 columns in row lane / 4, and two in that row + 8.
template <int Count>
__device__ void load_strip(float (&to)[Count], uint32_t from) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = 0; i < Count; ++i) {
    const uint32_t row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    to[i] = sum_at(from + (row << kLaneAt) + column);
  }
}

}  // namespace fusegen::tcgen05

#endif  // FUSEGEN_TCGEN05
