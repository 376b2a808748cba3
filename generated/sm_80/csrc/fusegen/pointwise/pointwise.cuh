// Skeleton of pointwise kernels: loads, one call of the generated Math per element, stores.
//
// Work is cut into pieces of a row, one warp each: the whole row where a result is summed over it,
// otherwise a fixed number of columns. There are as many blocks as that takes: the hardware starts
// the next one sooner than a loop would come to its next piece. A warp reads 16 bytes a lane and
// operand at a time where sizes and addresses allow, one element otherwise, and asks for several
// of them before it computes with the first. Row sums go through fp32 registers and a butterfly, so
// they repeat bit for bit. Operands without rows of their own form one long row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "fusegen/common/ceil_div.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/pointwise/pointwise.h"
#include "fusegen/pointwise/slot.h"

namespace fusegen {

namespace pointwise {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kVectorsPerLane = 4;  // of a piece that is not a whole row
inline constexpr int kBlocksPerSm = 4;     // at least: 64 registers a thread
inline constexpr int kLoads = 4;           // vectors of all operands that a lane waits for at once

template <class Math>
inline constexpr int kOperands = Math::operand_count;
template <class Math>
inline constexpr int kResults = Math::result_count;

template <class Math>
constexpr bool sums_rows() {
  for (int r = 0; r < kResults<Math>; ++r) {
    if (Math::result(r).access == Access::row) return true;
  }
  return false;
}

constexpr bool per_element(Access access) {
  return access != Access::row && access != Access::column;
}

// Whether rows are twice as long as the columns that are computed.
constexpr bool is_half(Access access) {
  return per_element(access) && access != Access::full;
}

// Whether it matters where a row ends: not if every operand and result is just elements.
template <class Math>
constexpr bool has_rows() {
  for (int o = 0; o < kOperands<Math>; ++o) {
    if (Math::operand(o).access != Access::full) return true;
  }
  for (int r = 0; r < kResults<Math>; ++r) {
    if (Math::result(r).access != Access::full) return true;
  }
  return false;
}

// Vectors per operand that a lane loads before it computes.
template <class Math>
constexpr int vectors_together() {
  int loads = 0;
  for (int o = 0; o < kOperands<Math>; ++o) loads += per_element(Math::operand(o).access);
  return loads > 0 && loads < kLoads ? kLoads / loads : 1;
}

__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(float value) { return value; }
__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }
__device__ inline void narrow(float value, float* to) { *to = value; }

// The elements of a word: by name, as compilers take the upper half of one apart in two steps.
__device__ __forceinline__ void widen_word(uint32_t word, float* to, __nv_bfloat16) {
  to[0] = __uint_as_float(word << 16);
  to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen_word(uint32_t word, float* to, __half) {
  __half pair[2];
  memcpy(pair, &word, sizeof word);
  to[0] = widen(pair[0]);
  to[1] = widen(pair[1]);
}
__device__ __forceinline__ void widen_word(uint32_t word, float* to, float) {
  *to = __uint_as_float(word);
}

template <class Element, int N>
struct alignas(sizeof(Element) * N <= 16 ? sizeof(Element) * N : 16) Pack {
  Element values[N];
};

// Past the L1 cache's coherence: nothing that is read here is written here, so that loads need not
// wait for the stores before them.
template <class Element, int N>
__device__ __forceinline__ void load(float (&to)[N], const void* base, int64_t index) {
  const Element* const from = static_cast<const Element*>(base) + index;
  if constexpr (sizeof(Element) * N % sizeof(uint4) == 0) {
    constexpr int kPerWord = sizeof(uint32_t) / sizeof(Element);
#pragma unroll
    for (int i = 0; i < N / (4 * kPerWord); ++i) {
      const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from) + i);
      float* const own = to + i * 4 * kPerWord;
      widen_word(bits.x, own, Element());
      widen_word(bits.y, own + kPerWord, Element());
      widen_word(bits.z, own + 2 * kPerWord, Element());
      widen_word(bits.w, own + 3 * kPerWord, Element());
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = widen(from[i]);
  }
}

// As words of 16 bytes, by name: the compiler stores a struct of 16-bit elements piece by piece.
template <class Element, int N>
__device__ __forceinline__ void store(const float (&from)[N], void* base, int64_t index) {
  Pack<Element, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) narrow(from[i], &pack.values[i]);
  Element* const to = static_cast<Element*>(base) + index;
  if constexpr (sizeof(pack) % sizeof(uint4) == 0) {
#pragma unroll
    for (int word = 0; word < int(sizeof(pack) / sizeof(uint4)); ++word) {
      uint4 bits;
      memcpy(&bits, reinterpret_cast<const char*>(&pack) + word * sizeof bits, sizeof bits);
      __stcs(reinterpret_cast<uint4*>(to) + word, bits);
    }
  } else {
    *reinterpret_cast<Pack<Element, N>*>(to) = pack;
  }
}

// Where (row, column) of an operand stands.
__device__ __forceinline__ int64_t place(Access access, int64_t row, int64_t column,
                                         int64_t columns) {
  switch (access) {
    case Access::full: return row * columns + column;
    case Access::first_half: return row * 2 * columns + column;
    case Access::second_half: return (row * 2 + 1) * columns + column;
    case Access::first_of_32: return row * 2 * columns + column + (column & ~int64_t(31));
    case Access::second_of_32: return row * 2 * columns + column + (column & ~int64_t(31)) + 32;
    case Access::row: return row;
    case Access::column: return column;
  }
  return 0;
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

template <class Math, class Element, int N>
__device__ __forceinline__ void load_operands(float (&values)[kOperands<Math>][N],
                                              const PointwiseArguments& in, int64_t row,
                                              int64_t column) {
#pragma unroll
  for (int o = 0; o < kOperands<Math>; ++o) {
    const Slot slot = Math::operand(o);
    if (slot.access == Access::row) {
      const float value = slot.wide ? static_cast<const float*>(in.operands[o])[row]
                                    : widen(static_cast<const Element*>(in.operands[o])[row]);
#pragma unroll
      for (int i = 0; i < N; ++i) values[o][i] = value;
    } else if (slot.wide) {
      load<float, N>(values[o], in.operands[o], place(slot.access, row, column, in.columns));
    } else {
      load<Element, N>(values[o], in.operands[o], place(slot.access, row, column, in.columns));
    }
  }
}

template <class Math, class Element, int N>
__device__ __forceinline__ void store_results(const float (&values)[kResults<Math>][N],
                                              float (&sums)[kResults<Math>],
                                              const PointwiseArguments& in, int64_t row,
                                              int64_t column) {
#pragma unroll
  for (int r = 0; r < kResults<Math>; ++r) {
    const Slot slot = Math::result(r);
    if (slot.access == Access::row) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[r] += values[r][i];
    } else if (in.results[r] == nullptr) {
      continue;
    } else if (slot.wide) {
      store<float, N>(values[r], in.results[r], place(slot.access, row, column, in.columns));
    } else {
      store<Element, N>(values[r], in.results[r], place(slot.access, row, column, in.columns));
    }
  }
}

// Vectors of N elements, a warp's width apart: all loads stand before the first result.
template <class Math, class Element, int N, int Vectors>
__device__ __forceinline__ void compute(float (&sums)[kResults<Math>],
                                        const PointwiseArguments& in, int64_t row,
                                        int64_t column) {
  float values[Vectors][kOperands<Math>][N];
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    load_operands<Math, Element, N>(values[v], in, row, column + v * kWarp * N);
  }
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    float outcomes[kResults<Math>][N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float element[kOperands<Math>];
      float outcome[kResults<Math>];
#pragma unroll
      for (int o = 0; o < kOperands<Math>; ++o) element[o] = values[v][o][i];
      Math::apply(element, outcome, in.scalars.data());
#pragma unroll
      for (int r = 0; r < kResults<Math>; ++r) outcomes[r][i] = outcome[r];
    }
    store_results<Math, Element, N>(outcomes, sums, in, row, column + v * kWarp * N);
  }
}

// Rows of all groups, found by one warp: sizes count from 0, and are clamped before they are added.
__device__ inline int64_t rows_of_groups(const PointwiseArguments& in, int lane) {
  int64_t sum = 0;
  for (int64_t g = lane; g < in.groups; g += kWarp) {
    sum += min(max(in.group_sizes[g], int64_t(0)), in.rows);
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

// N zeros of every result of a row that belongs to no group.
template <class Math, class Element, int N>
__device__ __forceinline__ void clear(const PointwiseArguments& in, int64_t row, int64_t column) {
  const float zeros[kResults<Math>][N] = {};
  float sums[kResults<Math>] = {};
  store_results<Math, Element, N>(zeros, sums, in, row, column);
}

// Columns of a warp that has no row of its own.
template <int N>
inline constexpr int64_t kPiece = kWarp * N * kVectorsPerLane;

// A warp's sums over a row, into results of one element per row.
template <class Math, class Element>
__device__ __forceinline__ void store_sums(const PointwiseArguments& in,
                                           const float (&sums)[kResults<Math>], uint32_t row,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < kResults<Math>; ++r) {
    const Slot slot = Math::result(r);
    if (slot.access != Access::row) continue;
    const float sum = warp_sum(sums[r]);
    if (lane != 0 || in.results[r] == nullptr) continue;
    if (slot.wide) {
      static_cast<float*>(in.results[r])[row] = sum;
    } else {
      narrow(sum, static_cast<Element*>(in.results[r]) + row);
    }
  }
}

// N elements per access. With `kGrouped`, rows past the groups are not read, and zero in every result
// or left alone.
template <class Math, class Element, int N, bool kGrouped>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kernel(const __grid_constant__ PointwiseArguments in, uint32_t pieces_per_row,
           uint32_t pieces) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int kTogether = vectors_together<Math>();
  constexpr bool kWholeRow = sums_rows<Math>();
  const int lane = threadIdx.x % kWarp;
  const uint32_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (index >= pieces) return;
  // In 32 bits: a division of 64 is a call that every load would wait for.
  constexpr bool kRows = has_rows<Math>() || kGrouped;
  const uint32_t row = kWholeRow ? index : kRows ? index / pieces_per_row : 0;
  const int64_t begin = kWholeRow ? 0 : (index - row * pieces_per_row) * kPiece<N>;
  const int64_t end = kWholeRow ? in.columns : min(begin + kPiece<N>, in.columns);
  float sums[kResults<Math>] = {};
  int64_t column = begin + lane * N;
  if (kGrouped && row >= rows_of_groups(in, lane)) {
    if (!in.clears) return;
#pragma unroll 1
    for (; column < end; column += kWarp * N) clear<Math, Element, N>(in, row, column);
  }
#pragma unroll 1
  for (; column + (kTogether - 1) * kWarp * N < end; column += kTogether * kWarp * N) {
    compute<Math, Element, N, kTogether>(sums, in, row, column);
  }
#pragma unroll 1
  for (; column < end; column += kWarp * N) compute<Math, Element, N, 1>(sums, in, row, column);
  if constexpr (kWholeRow) store_sums<Math, Element>(in, sums, row, lane);
}

template <class Math, class Element, int N, bool kGrouped>
Status launch(const PointwiseArguments& in, Stream& stream) {
  const int64_t pieces_per_row = sums_rows<Math>() ? 1 : ceil_div(in.columns, kPiece<N>);
  const int64_t pieces = in.rows * pieces_per_row;
  if (pieces == 0) return {};
  if (pieces > INT32_MAX) return {cudaErrorInvalidValue, "pieces of rows: fewer than 2^31"};
  const Grid grid{dim3(unsigned(ceil_div(pieces, kThreads / kWarp))), kThreads};
  return launch_kernel("cudaLaunchKernelEx(pointwise)", &kernel<Math, Element, N, kGrouped>, grid,
                       stream, in, uint32_t(pieces_per_row), uint32_t(pieces));
}

}  // namespace pointwise

// Addresses are multiples of 16 bytes; rows are too where the columns are a multiple of 8.
template <class Math, class Element, bool kGrouped = false>
Status launch_pointwise(PointwiseArguments in, Stream& stream) {
  constexpr int kVector = 16 / sizeof(Element);
  if constexpr (!pointwise::has_rows<Math>() && !kGrouped) {
    in.columns *= in.rows;
    in.rows = 1;
  }
  return in.columns % kVector == 0 ? pointwise::launch<Math, Element, kVector, kGrouped>(in, stream)
                                   : pointwise::launch<Math, Element, 1, kGrouped>(in, stream);
}

}  // namespace fusegen
