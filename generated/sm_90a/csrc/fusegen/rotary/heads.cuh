// Heads whose pairs are rotated: each element is read and written once, 16 bytes at a time.
//
// A thread has 8 pairs of a row at the same place of several heads, so that what it reads of the
// tables serves all of them: two vectors of a head, half a head apart or neighbours.  Where a head
// lies, and whether it is rotated or copied, the types of what is read and of what is written say.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/rotary/rotary.h"

namespace fusegen::rotary {

inline constexpr int kThreads = 256;
inline constexpr int kPairs = row::kVector;  // of a thread in a head: two vectors of elements
inline constexpr int kHeads = 4;             // of a thread
inline constexpr int64_t kMostHeads = kHeads * int64_t(65535);  // by the second dimension of a grid

// Heads of a row, one behind the other in one tensor.
template <class Vector>
struct Row {
  Vector* data;
  int64_t vectors;  // of a row

  __device__ __forceinline__ Vector* head(int64_t row, int64_t head, int64_t head_vectors) const {
    return data + row * vectors + head * head_vectors;
  }

  __device__ __forceinline__ static bool rotates(int64_t /*head*/) { return true; }
};

// Heads of queries, then of keys, then of values, each in a tensor of its own.
template <class Vector>
struct QueriesKeysValues {
  Vector* queries;
  Vector* keys;
  Vector* values;
  int64_t query_heads, key_heads;  // there are as many heads of values as of keys

  __device__ __forceinline__ Vector* head(int64_t row, int64_t head, int64_t head_vectors) const {
    if (head < query_heads) return queries + (row * query_heads + head) * head_vectors;
    const int64_t key = head - query_heads, value = key - key_heads;
    return value < 0 ? keys + (row * key_heads + key) * head_vectors
                     : values + (row * key_heads + value) * head_vectors;
  }

  __device__ __forceinline__ bool rotates(int64_t head) const {
    return head < query_heads + key_heads;
  }
};

// Tables of angles [rows, pairs], and which way they rotate.
struct Tables {
  const float* cos;
  const float* sin;
  RotaryDirection direction;
};

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

  __device__ __forceinline__ void load(const Tables& in, int64_t at) {
    load_angles(in.cos + at, cos);
    load_angles(in.sin + at, sin);
    if (in.direction == RotaryDirection::forward) return;
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

template <class From, class To>
struct Rotation {
  From from;
  To to;
  Tables tables;
  int64_t rows;
  int64_t heads;  // of a row
  int64_t pairs;  // of a head

  __device__ __forceinline__ bool rotates(int64_t head) const {
    return from.rotates(head) && to.rotates(head);
  }
};

template <class Element, bool interleaved, class From, class To>
static __global__ void __launch_bounds__(kThreads)
    rotate_heads(const __grid_constant__ Rotation<From, To> in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t parts = in.pairs / kPairs;
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= in.rows * parts) return;
  const int64_t at = index / parts, part = index % parts;

  const int64_t head_vectors = 2 * in.pairs / row::kVector;
  const int64_t one = interleaved ? 2 * part : part, apart = interleaved ? 1 : parts;
  const int64_t first = int64_t(blockIdx.y) * kHeads;
  Angles angles;
  if (in.rotates(first)) angles.load(in.tables, index * kPairs);  // the same for a block
  uint4 a[kHeads], b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first + i >= in.heads) break;
    const uint4* const x = in.from.head(at, first + i, head_vectors) + one;
    a[i] = __ldg(x);
    b[i] = __ldg(x + apart);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first + i >= in.heads) break;
    if (in.rotates(first + i)) rotate<Element, interleaved>(angles, a[i], b[i]);
    uint4* const y = in.to.head(at, first + i, head_vectors) + one;
    y[0] = a[i];
    y[apart] = b[i];
  }
}

// Of rows [rows, columns] of heads of 2 * pairs columns.
inline Status check_sizes(int64_t rows, int64_t columns, int64_t pairs) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (rows < 0 || rows > INT32_MAX) return {kInvalid, "0 <= rows < 2^31"};
  if (pairs < kPairs || pairs % kPairs != 0) {
    return {kInvalid, "pairs of a head: a multiple of 8"};
  }
  if (columns < 0 || columns % (2 * pairs) != 0) {
    return {kInvalid, "columns: a multiple of a head's"};
  }
  if (columns / (2 * pairs) > kMostHeads) return {kInvalid, "heads: at most 262140"};
  if (rows * (pairs / kPairs) > INT32_MAX * int64_t(kThreads)) {
    return {kInvalid, "pairs of a head: fewer blocks than 2^31"};
  }
  return {};
}

template <class Element, class From, class To>
static Status launch_rotation(const char* call, const Rotation<From, To>& in, bool interleaved,
                              Stream& stream) {
  if (in.rows == 0 || in.heads == 0) return {};
  const int64_t threads = in.rows * (in.pairs / kPairs);
  const Grid grid{dim3(unsigned(ceil_div(threads, kThreads)),
                       unsigned(ceil_div(in.heads, kHeads))),
                  kThreads};
  auto* const kernel =
      interleaved ? &rotate_heads<Element, true, From, To> : &rotate_heads<Element, false, From, To>;
  return launch_kernel(call, kernel, grid, stream, in);
}

}  // namespace fusegen::rotary
