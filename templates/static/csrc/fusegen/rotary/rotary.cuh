// Rotary embeddings: each element is read and written once, 16 bytes at a time.
//
// A thread has 8 pairs of a row at the same place of several heads, so that what it reads of the
// tables serves all of them: two vectors of a head, half a head apart or neighbours.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/rotary/rotary.h"

namespace fusegen {

namespace rotary {

inline constexpr int kThreads = 256;
inline constexpr int kPairs = row::kVector;  // of a thread in a head: two vectors of elements
inline constexpr int kHeads = 4;             // of a thread
inline constexpr int64_t kMostHeads = kHeads * int64_t(65535);  // by the second dimension of a grid

__device__ __forceinline__ void load_angles(const float* from, float (&to)[kPairs]) {
  const uint4* const words = reinterpret_cast<const uint4*>(from);
#pragma unroll
  for (int i = 0; i < kPairs / 4; ++i) {
    const uint4 bits = __ldg(words + i);
    to[4 * i] = __uint_as_float(bits.x);
    to[4 * i + 1] = __uint_as_float(bits.y);
    to[4 * i + 2] = __uint_as_float(bits.z);
    to[4 * i + 3] = __uint_as_float(bits.w);
  }
}

// Of 8 pairs, the cosine and the sine by which they are rotated.
struct Angles {
  float cos[kPairs], sin[kPairs];

  __device__ Angles(const RotaryArguments& in, int64_t at) {
    load_angles(in.cos + at, cos);
    load_angles(in.sin + at, sin);
    if (in.kind == RotaryDirection::forward) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sin[i] = -sin[i];
  }

  __device__ __forceinline__ void rotate(int i, float& a, float& b) const {
    const float first = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = first;
  }
};

// The pairs of two vectors: (one[i], other[i]), or neighbours within a vector.
template <class Element, bool interleaved>
__device__ __forceinline__ void rotate(const Angles& angles, uint4& one, uint4& other) {
  constexpr int kHalf = kPairs / 2;
  float a[row::kVector], b[row::kVector];
  row::unpack<Element>(one, a);
  row::unpack<Element>(other, b);
  if constexpr (interleaved) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      angles.rotate(i, a[2 * i], a[2 * i + 1]);
      angles.rotate(kHalf + i, b[2 * i], b[2 * i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angles.rotate(i, a[i], b[i]);
  }
  one = row::pack<Element>(a);
  other = row::pack<Element>(b);
}

template <class Element, bool interleaved>
static __global__ void __launch_bounds__(kThreads)
    rotate_rows(const __grid_constant__ RotaryArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t parts = in.pairs / kPairs;
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= in.rows * parts) return;
  const int64_t at = index / parts, part = index % parts;
  const Angles angles(in, index * kPairs);

  const int64_t head_vectors = 2 * in.pairs / row::kVector;
  const int64_t one = interleaved ? 2 * part : part, apart = interleaved ? 1 : parts;
  const int64_t begin = at * (in.columns / row::kVector) + one;
  const uint4* const x = static_cast<const uint4*>(in.x) + begin;
  uint4* const y = static_cast<uint4*>(in.y) + begin;
  const int64_t heads = in.columns / (2 * in.pairs), first = int64_t(blockIdx.y) * kHeads;
  uint4 a[kHeads], b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first + i >= heads) break;
    a[i] = __ldg(x + (first + i) * head_vectors);
    b[i] = __ldg(x + (first + i) * head_vectors + apart);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first + i >= heads) break;
    rotate<Element, interleaved>(angles, a[i], b[i]);
    y[(first + i) * head_vectors] = a[i];
    y[(first + i) * head_vectors + apart] = b[i];
  }
}

inline Status check_sizes(const RotaryArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.rows < 0 || in.rows > INT32_MAX) return {kInvalid, "0 <= rows < 2^31"};
  if (in.pairs < kPairs || in.pairs % kPairs != 0) {
    return {kInvalid, "pairs of a head: a multiple of 8"};
  }
  if (in.columns < 0 || in.columns % (2 * in.pairs) != 0) {
    return {kInvalid, "columns: a multiple of a head's"};
  }
  if (in.columns / (2 * in.pairs) > kMostHeads) return {kInvalid, "heads: at most 262140"};
  if (in.rows * (in.pairs / kPairs) > INT32_MAX * int64_t(kThreads)) {
    return {kInvalid, "pairs of a head: fewer blocks than 2^31"};
  }
  return {};
}

}  // namespace rotary

template <class Element>
static Status launch_rotary(const RotaryArguments& in, Stream& stream) {
  using namespace rotary;
  const Status status = check_sizes(in);
  if (!status.ok() || in.rows == 0 || in.columns == 0) return status;
  const int64_t threads = in.rows * (in.pairs / kPairs), heads = in.columns / (2 * in.pairs);
  const Grid grid{dim3(unsigned((threads + kThreads - 1) / kThreads),
                       unsigned((heads + kHeads - 1) / kHeads)),
                  kThreads};
  auto* const kernel = in.interleaved ? &rotate_rows<Element, true> : &rotate_rows<Element, false>;
  return launch_kernel("cudaLaunchKernelEx(rotary)", kernel, grid, stream, in);
}

}  // namespace fusegen
