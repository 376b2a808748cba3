// What dropout and its gradient share: elements in vectors of 16 bytes, a byte of the mask each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace dropout {

inline constexpr int kThreads = 256;
inline constexpr int kVectors = 4;      // of a thread: all of its loads stand before its first store
inline constexpr int kBlocksPerSm = 4;  // at least: 64 registers a thread
inline constexpr int64_t kPiece = int64_t(kThreads) * kVectors;  // vectors of a block

static_assert(row::kVector == 8, "a byte of the mask has the bits of a vector");

// What kept elements are multiplied with; none is kept where p is 1.
inline float scale_of(float p) { return p == 1.0f ? 0.0f : 1.0f / (1.0f - p); }

// The first vector of a thread; the others follow a block's width apart.
__device__ __forceinline__ int64_t first_vector() {
  return int64_t(blockIdx.x) * kPiece + threadIdx.x;
}

// Elements times `scale` where their bit of `kept` is set, rounded once; 0 elsewhere, whatever they are.
template <class Element>
__device__ __forceinline__ uint4 scaled(const uint4& packed, uint32_t kept, float scale) {
  float values[row::kVector];
  row::unpack<Element>(packed, values);
#pragma unroll
  for (int i = 0; i < row::kVector; ++i) {
    values[i] = kept >> i & 1 ? values[i] * scale : 0.0f;
  }
  return row::pack<Element>(values);
}

// A kernel over all vectors of [rows, columns].
template <class Arguments, class... Rest>
Status launch_vectors(const char* call, void (*kernel)(Arguments, int64_t, Rest...),
                      const Arguments& in, Stream& stream, const Rest&... rest) {
  if (!(in.p >= 0.0f && in.p <= 1.0f)) return {cudaErrorInvalidValue, "dropout: p from 0 to 1"};
  const int64_t vectors = in.rows * (in.columns / row::kVector);
  if (vectors == 0) return {};
  const int64_t blocks = (vectors + kPiece - 1) / kPiece;
  if (blocks > INT32_MAX) return {cudaErrorInvalidValue, "dropout: fewer than 2^44 elements"};
  const Grid grid{dim3(unsigned(blocks)), kThreads};
  return launch_kernel(call, kernel, grid, stream, in, vectors, rest...);
}

}  // namespace dropout

}  // namespace fusegen
