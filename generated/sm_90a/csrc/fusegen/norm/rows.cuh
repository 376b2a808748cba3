// Rows in the registers of teams of threads, and sums over them.
//
// A team is a part of a warp, a warp, or several up to the whole block; vector `i` of a thread is
// the 16 bytes i * team + lane of the row, so that neighbours read neighbouring bytes. Butterflies
// add within a warp and then across warps, so that every thread has the same bits and results
// repeat.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/norm/kind.h"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace norm {

using row::kAllLanes;
using row::kVector;
using row::kWarp;

template <int threads, int team, int vectors>
struct Shape {
  static constexpr int kTeam = team;                               // threads of a row
  static constexpr int kVectors = vectors;                         // that each has of it
  static constexpr int kThreads = threads > team ? threads : team; // of a block
  static constexpr int kRows = kThreads / team;
  static constexpr int kColumns = team * vectors * kVector;        // of a row, at most
};

// A thread's place in its block.
template <class S>
struct Place {
  int lane, row;

  __device__ Place() : lane(threadIdx.x % S::kTeam), row(threadIdx.x / S::kTeam) {}

  __device__ int column(int i) const { return lane * kVector + i * (S::kTeam * kVector); }
};

__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }

struct Values {
  float of[kVector];
};

template <class Element>
__device__ __forceinline__ Values unpack(const uint4& packed) {
  Values values;
  row::unpack<Element>(packed, values.of);
  return values;
}

template <class Element>
__device__ __forceinline__ uint4 pack(const Values& values) {
  return row::pack<Element>(values.of);
}

template <class Element>
__device__ __forceinline__ uint4 load_vector(const void* from, int64_t at) {
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const Element*>(from) + at));
}

// What a thread has of a row; zeros past its end, and of a row that is not there.
template <class Element, class S>
__device__ __forceinline__ void load_row(uint4 (&row)[S::kVectors], const void* from, int64_t begin,
                                         int columns, bool there, const Place<S>& place) {
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    const int column = place.column(i);
    row[i] = there && column < columns ? load_vector<Element>(from, begin + column)
                                       : make_uint4(0, 0, 0, 0);
  }
}

// The sum of two vectors, rounded as if a step of its own had stored it.
template <class Element>
__device__ __forceinline__ uint4 plus(const uint4& vector, const uint4& added) {
  Values sum = unpack<Element>(vector);
  const Values more = unpack<Element>(added);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum.of[j] += more.of[j];
  return pack<Element>(sum);
}

// Has the compiler unpack a row anew behind this: kept for a second use, its values would take twice
// the registers.
template <int count>
__device__ __forceinline__ void forget_unpacked(uint4 (&row)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    asm volatile("" : "+r"(row[i].x), "+r"(row[i].y), "+r"(row[i].z), "+r"(row[i].w));
  }
}

// Vector at a column of what all rows share; zeros where there is none.
template <class Element>
__device__ __forceinline__ uint4 load_shared(const void* from, int column) {
  return from != nullptr ? load_vector<Element>(from, column) : make_uint4(0, 0, 0, 0);
}

// Weights as rows are multiplied by them.
template <class Element>
struct Gamma {
  const void* weight;
  float added;

  __device__ Gamma(const void* weight, bool zero_centered)
      : weight(weight), added(weight == nullptr || zero_centered ? 1.0f : 0.0f) {}

  // `there`: whether rows have the column.
  __device__ __forceinline__ Values operator()(int column, bool there = true) const {
    Values values = unpack<Element>(load_shared<Element>(there ? weight : nullptr, column));
#pragma unroll
    for (int i = 0; i < kVector; ++i) values.of[i] += added;
    return values;
  }
};

template <int distance, int count>
__device__ __forceinline__ void butterfly(float (&sums)[count]) {
  if constexpr (distance > 0) {
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
    butterfly<distance / 2>(sums);
  }
}

// Until all threads of a team have come here. Teams of a block do not wait for each other: while one
// has a barrier's latency, another one computes.
template <class S>
__device__ __forceinline__ void wait_for_team() {
  if constexpr (S::kTeam == S::kThreads) {
    __syncthreads();
  } else {
    static_assert(S::kRows < 16, "hardware barriers, of which 0 is the block's");
    __barrier_sync_count(1 + threadIdx.x / S::kTeam, S::kTeam);
  }
}

// Sums over the threads of each team, all of which call it; where it is of several warps, `across` is
// not written again before its next barrier.
template <class S, int count>
__device__ __forceinline__ void add_up(float (&sums)[count],
                                       float (&across)[S::kThreads / kWarp][count]) {
  butterfly<(S::kTeam < kWarp ? S::kTeam : kWarp) / 2>(sums);
  if constexpr (S::kTeam > kWarp) {
    constexpr int kWarps = S::kTeam / kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) across[warp][i] = sums[i];
    }
    wait_for_team<S>();
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = across[warp / kWarps * kWarps + lane % kWarps][i];
    butterfly<kWarps / 2>(sums);
  }
}

// Elements that a sum over a row is divided by.
__device__ inline float count_of(NormKind kind, int columns) {
  return kind == NormKind::l2 ? 1.0f : float(columns);
}

inline Status check_rows(int64_t rows, int64_t columns) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (rows < 0 || rows > INT32_MAX) return {kInvalid, "0 <= rows < 2^31"};
  if (columns < kVector || columns % kVector != 0) return {kInvalid, "columns: a multiple of 8"};
  if (columns > kMostNormColumns) return {kInvalid, "columns <= 65536"};
  return {};
}

}  // namespace norm

}  // namespace fusegen
