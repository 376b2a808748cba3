// Column sums of the rows of each group: the bias gradient, dbias[g, c] = sum of dy[t, c].
//
// dy is [T, N], each row times a scale where there are some, groups of rows as in schedule.cuh, sums
// in fp32, result [E, N] in the element type or in fp32. Rows are dealt out to `parts`, 32 to each in
// turn, and 64 columns of a part are one team's, 256 threads: each adds every (32 * parts)-th row of 8
// columns, then 64 of them add the team's 32 partial sums, and at last those of the parts. Every
// order is fixed and the same in both forms, so results repeat bit for bit, on every architecture; no
// workspace, no atomics.
//
// - Where there are clusters a team is a CTA and the parts of 64 columns are a cluster, whose first
//   CTA reads the sums of its neighbours through distributed shared memory.
// - Elsewhere one CTA has all parts of its columns, four at a time, since 1024 threads are the most
//   that it can have: 64 KiB of loads in flight. Loads take some 600 ns, so that 15 such CTAs, about
//   1000 columns, keep 1.5 TB/s of memory busy. Parts in turn on 256 threads would take four times as
//   many, and a CTA for fewer columns would read parts of lines.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/reduce/group_sum.h"
#include "fusegen/launch/launch.cuh"

namespace fusegen {

namespace group_sum {

inline constexpr int kTeam = 256;                    // threads that add the rows of a part
inline constexpr int kColumns = 64;                  // per team: one 128-byte line of a row
inline constexpr int kVector = 8;                    // elements in 16 bytes
inline constexpr int kVectors = kColumns / kVector;  // threads side by side on a row
inline constexpr int kRows = kTeam / kVectors;       // rows a team reads at once
inline constexpr int kUnroll = 4;                    // independent loads in flight per thread
inline constexpr int kMostParts = 8;
inline constexpr int kMostTeams = 4;                 // of a CTA without a cluster

struct Range {
  int64_t begin, end;
};

__device__ inline int64_t clamp_size(int64_t size, int64_t tokens) {
  return max(int64_t(0), min(size, tokens));
}

// Rows of a group, found by one warp. Sizes are clamped before they are added, so 512 of them
// stay far from the end of int64.
__device__ inline Range group_range(const int64_t* group_sizes, int64_t tokens, int group,
                                    int lane) {
  if (group_sizes == nullptr) return {0, tokens};
  int64_t before = 0;
  for (int g = lane; g < group; g += 32) before += clamp_size(group_sizes[g], tokens);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    before += __shfl_xor_sync(0xffffffffu, before, distance);
  }
  const int64_t begin = min(before, tokens);
  return {begin, min(begin + clamp_size(group_sizes[group], tokens), tokens)};
}

__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline void narrow(float value, float* to) { *to = value; }
__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }

template <class Element, bool scaled>
__device__ void add_vector(float (&sums)[kVector], const uint4& packed, const float* scale) {
  const auto* values = reinterpret_cast<const Element*>(&packed);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums[i] += scaled ? __ldg(scale) * widen(values[i]) : widen(values[i]);
  }
}

// Rows begin, begin + step, ... of 8 columns, with kUnroll loads in flight.
template <class Element, bool scaled>
__device__ void add_rows(float (&sums)[kVector], const Element* column, const float* scales,
                         int64_t n, int64_t begin, int64_t end, int64_t step) {
  int64_t row = begin;
  for (; row + (kUnroll - 1) * step < end; row += kUnroll * step) {
    uint4 packed[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      packed[i] = __ldg(reinterpret_cast<const uint4*>(column + (row + i * step) * n));
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      add_vector<Element, scaled>(sums, packed[i], scales + row + i * step);
    }
  }
  for (; row < end; row += step) {
    const uint4 packed = __ldg(reinterpret_cast<const uint4*>(column + row * n));
    add_vector<Element, scaled>(sums, packed, scales + row);
  }
}

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ inline float load_from_rank(const float* address, uint32_t rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}"
      : "=f"(value)
      : "r"(uint32_t(__cvta_generic_to_shared(address))), "r"(rank));
  return value;
}

// A thread's place in its team: one of 8 vectors beside each other, of one of 32 rows.
struct Place {
  int vector, row;

  __device__ explicit Place(unsigned thread) : vector(thread % kVectors), row(thread / kVectors) {}
};

using TeamSums = float[kRows][kColumns];

__device__ __forceinline__ void put(TeamSums& to, Place place, const float (&sums)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[place.row][place.vector * kVector + i] = sums[i];
}

__device__ __forceinline__ float add_up(const TeamSums& sums, int column) {
  float sum = 0.f;
#pragma unroll
  for (int row = 0; row < kRows; ++row) sum += sums[row][column];
  return sum;
}

// Grid (parts, columns / 64, groups), cluster (parts, 1, 1).
template <class Element, class Output, bool scaled>
static __global__ void __launch_bounds__(kTeam)
    cluster_kernel(const Element* input, Output* output, const int64_t* group_sizes,
                   const float* scales, int64_t tokens, int64_t n) {
  __shared__ TeamSums partial;
  __shared__ float total[kColumns];
  const Place place(threadIdx.x);
  const int64_t first_column = int64_t(blockIdx.y) * kColumns;
  const int64_t column = first_column + place.vector * kVector;

  wait_for_previous_kernel();
  const Range rows = group_range(group_sizes, tokens, blockIdx.z, threadIdx.x % 32);
  float sums[kVector] = {};
  if (column < n) {
    const int64_t step = int64_t(kRows) * cluster_size();
    add_rows<Element, scaled>(sums, input + column, scales, n,
                              rows.begin + cluster_rank() * kRows + place.row, rows.end, step);
  }
  put(partial, place, sums);
  __syncthreads();
  let_next_kernel_start();

  if (threadIdx.x < kColumns) total[threadIdx.x] = add_up(partial, threadIdx.x);
  cluster_sync();
  if (cluster_rank() == 0 && threadIdx.x < kColumns && first_column + threadIdx.x < n) {
    float sum = total[threadIdx.x];
    for (uint32_t rank = 1; rank < cluster_size(); ++rank) {
      sum += load_from_rank(&total[threadIdx.x], rank);
    }
    narrow(sum, output + int64_t(blockIdx.z) * n + first_column + threadIdx.x);
  }
  cluster_sync();  // a neighbour's shared memory must outlive the reads above
}

// Grid (1, columns / 64, groups); as many teams as there are parts, or a quarter or half of that.
template <class Element, class Output, bool scaled>
static __global__ void __launch_bounds__(kTeam* kMostTeams)
    block_kernel(const Element* input, Output* output, const int64_t* group_sizes,
                 const float* scales, int64_t tokens, int64_t n, uint32_t parts) {
  __shared__ TeamSums partial[kMostTeams];
  __shared__ float total[kMostParts][kColumns];
  const uint32_t team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
  const unsigned thread = threadIdx.x % kTeam;
  const Place place(thread);
  const int64_t first_column = int64_t(blockIdx.y) * kColumns;
  const int64_t column = first_column + place.vector * kVector;

  wait_for_previous_kernel();
  const Range rows = group_range(group_sizes, tokens, blockIdx.z, threadIdx.x % 32);
#pragma unroll 1
  for (uint32_t part = team; part < parts; part += teams) {
    float sums[kVector] = {};
    if (column < n) {
      const int64_t step = int64_t(kRows) * parts;
      add_rows<Element, scaled>(sums, input + column, scales, n,
                                rows.begin + part * kRows + place.row, rows.end, step);
    }
    put(partial[team], place, sums);
    __syncthreads();
    if (thread < kColumns) total[part][thread] = add_up(partial[team], thread);
    __syncthreads();  // the team's sums have been read
  }
  let_next_kernel_start();

  if (threadIdx.x < kColumns && first_column + threadIdx.x < n) {
    float sum = total[0][threadIdx.x];
    for (uint32_t part = 1; part < parts; ++part) sum += total[part][threadIdx.x];
    narrow(sum, output + int64_t(blockIdx.z) * n + first_column + threadIdx.x);
  }
}

}  // namespace group_sum

template <class Element, class Output = Element>
static Status launch_group_sum(const GroupSumArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.tokens < 0) return {kInvalid, "tokens >= 0"};
  if (in.groups < 1 || in.groups > 65535) return {kInvalid, "1 <= groups <= 65535"};
  if (in.group_sizes == nullptr && in.groups != 1) return {kInvalid, "dense: groups = 1"};
  if (in.n < kRowAlignment || in.n % kRowAlignment != 0) return {kInvalid, "n: a multiple of 8"};
  const int64_t column_blocks = (in.n + group_sum::kColumns - 1) / group_sum::kColumns;
  if (column_blocks > 65535) return {kInvalid, "n <= 65535 * 64"};

  // Parts until a GPU is busy, whichever it is: a function of the sizes, as results depend on it.
  constexpr int64_t kTeams = 4 * 132;  // four to an SM of an H100
  int parts = 1;
  while (parts < group_sum::kMostParts && parts * column_blocks * in.groups < kTeams) parts *= 2;
  constexpr const char* kCall = "cudaLaunchKernelEx(group_sum)";
  const auto* input = static_cast<const Element*>(in.input);
  auto* output = static_cast<Output*>(in.output);
  if constexpr (kClusters) {
    const auto kernel = in.scales != nullptr ? &group_sum::cluster_kernel<Element, Output, true>
                                             : &group_sum::cluster_kernel<Element, Output, false>;
    Grid grid{dim3(parts, unsigned(column_blocks), unsigned(in.groups)), group_sum::kTeam};
    grid.cluster = parts;
    return launch_kernel(kCall, kernel, grid, stream, input, output, in.group_sizes, in.scales,
                         in.tokens, in.n);
  } else {
    const auto kernel = in.scales != nullptr ? &group_sum::block_kernel<Element, Output, true>
                                             : &group_sum::block_kernel<Element, Output, false>;
    const int teams = parts < group_sum::kMostTeams ? parts : group_sum::kMostTeams;
    const Grid grid{dim3(1, unsigned(column_blocks), unsigned(in.groups)),
                    teams * group_sum::kTeam};
    return launch_kernel(kCall, kernel, grid, stream, input, output, in.group_sizes, in.scales,
                         in.tokens, in.n, uint32_t(parts));
  }
}

}  // namespace fusegen
