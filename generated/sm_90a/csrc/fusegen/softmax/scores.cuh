// The scores of a row, scale * x + bias, where what is left out counts as -inf.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/softmax.h"

namespace fusegen {

namespace softmax {

using row::kVector;

// A row of x, and what belongs to it of the other operands.
struct ScoreRow {
  const uint4* x;
  const uint2* mask;   // bytes, not 0: left out
  const uint4* bias;
  float scale;
  int end;             // columns from here on are left out; 0 or less: all are

  // Rows are fewer than 2^31: a division of 64 bits is a call that every load would wait for.
  template <class Element>
  __device__ static ScoreRow of(const SoftmaxArguments& in, int64_t index) {
    const uint32_t matrix = uint32_t(in.heads) * uint32_t(in.queries);
    const uint32_t query = uint32_t(index) % uint32_t(in.queries);
    const int64_t shared = (uint32_t(index) / matrix * in.queries + query) * in.columns;
    const auto* const x = static_cast<const Element*>(in.x) + index * in.columns;
    const auto* const mask = static_cast<const uint8_t*>(in.mask);
    const auto* const bias = static_cast<const Element*>(in.bias);
    return {
        reinterpret_cast<const uint4*>(x),
        mask == nullptr ? nullptr : reinterpret_cast<const uint2*>(mask + shared),
        bias == nullptr ? nullptr : reinterpret_cast<const uint4*>(bias + shared),
        in.scale,
        int(in.causal_queries == 0 ? in.columns : query + 1 + in.columns - in.causal_queries),
    };
  }

  __device__ bool has(int vector) const { return vector * kVector < end; }
};

// Vectors `first`, `first + step`, ... of a row. All loads of an operand stand before the first use
// of one.
template <class Element, int kVectors>
__device__ __forceinline__ void load_scores(float (&scores)[kVectors][kVector], const ScoreRow& row,
                                            int first, int step) {
  uint4 packed[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    packed[v] = row.has(first + v * step) ? __ldg(row.x + first + v * step) : uint4{};
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    row::unpack<Element>(packed[v], scores[v]);
#pragma unroll
    for (float& score : scores[v]) score *= row.scale;
  }
  if (row.bias != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      packed[v] = row.has(first + v * step) ? __ldg(row.bias + first + v * step) : uint4{};
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float bias[kVector];
      row::unpack<Element>(packed[v], bias);
#pragma unroll
      for (int i = 0; i < kVector; ++i) scores[v][i] += bias[i];
    }
  }
  if (row.mask != nullptr) {
    uint2 bytes[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      bytes[v] = row.has(first + v * step) ? __ldg(row.mask + first + v * step) : uint2{};
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint32_t word = i < kVector / 2 ? bytes[v].x : bytes[v].y;
        if ((word >> (i % (kVector / 2) * 8) & 0xff) != 0) scores[v][i] = -INFINITY;
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int left = row.end - (first + v * step) * kVector;
    if (left >= kVector) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= left) scores[v][i] = -INFINITY;
    }
  }
}

}  // namespace softmax

}  // namespace fusegen
