// Where each choice of a token lies among the rows of experts: a stable counting sort by expert.
//
// The slots are cut into parts, one for each block. A first kernel counts how often each expert is
// chosen in each part; a second one adds up the counts of the parts before its own, finds where each
// expert's rows begin, and gives each slot its expert's next row. Within a part a block has chunks of
// 2048 slots, 128 neighbours for each warp, 32 at a time: lanes of one expert find each other by
// ballots on the bits of ids, and each warp counts its own experts in shared memory, of which the
// block sums up those of earlier warps. Nothing is added by atomics, so that ranks follow from places
// alone.
//
// R = 65536 slots and 256 experts are 32 parts. What is to be expected on an H200: ids are 256 KiB and
// maps twice that, 0.2 us of its memory; the longest way is that of the last block, which waits for
// ids (1 us behind a launch of 2), ranks four times 32 slots a warp (4 x 100 cycles), and reads 31
// counts of each expert from the L2 cache in two rounds of 16 (1 us). All that the second kernel does
// before it reads the first one's counts, it does beside it, so both are 5 to 7 us.
//
// One kernel, a cluster of 8 or 16 blocks with a barrier between counting and placing, was built: the
// launch that it saves is less than what 32 blocks save on everything else.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/routing/routing_plan.h"

namespace fusegen {

namespace routing {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kOfLane = 4;                   // slots of a lane in a chunk
inline constexpr int kOfWarp = 32 * kOfLane;        // neighbouring slots
inline constexpr int kChunk = kWarps * kOfWarp;     // 2048 slots
inline constexpr int kMostExperts = 1024;
inline constexpr int kOfThread = kMostExperts / kThreads;  // neighbouring experts
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kNobody = -1;

static_assert(kChunk <= UINT16_MAX, "counts of a chunk are of 16 bits");

// Slots that are there, of a lane in its warp's part of a chunk; those of others are nobody's.
struct Chunk {
  int32_t ids[kOfLane];

  // The place of the lane's slot of a round within the chunk.
  static __device__ __forceinline__ int place(int round) {
    return int(threadIdx.x) / 32 * kOfWarp + round * 32 + int(threadIdx.x) % 32;
  }

  __device__ __forceinline__ void load(const int32_t* from, int64_t first, int64_t end,
                                       int32_t experts) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int64_t slot = first + place(i);
      const int32_t id = slot < end ? __ldg(from + slot) : kNobody;
      ids[i] = uint32_t(id) < uint32_t(experts) ? id : kNobody;
    }
  }
};

// How often each expert is chosen by a warp's slots of a chunk. First clear, then rank.
using Counts = uint16_t[kWarps][kMostExperts];

__device__ __forceinline__ void clear(Counts& counts, int32_t experts) {
  for (int e = int(threadIdx.x) % 32; e < experts; e += 32) counts[threadIdx.x / 32][e] = 0;
  __syncwarp();
}

// Lanes of the warp that have the same id, of which `bits` say which it is. A few instructions a bit,
// where __match_any_sync takes some 70 cycles of a multiprocessor if ids are many.
__device__ __forceinline__ unsigned lanes_with(int32_t id, int bits) {
  unsigned lanes = kAllLanes;
  for (int bit = 0; bit < bits; ++bit) {
    const bool is_set = id >> bit & 1;
    const unsigned set = __ballot_sync(kAllLanes, is_set);
    lanes &= is_set ? set : ~set;
  }
  return lanes;
}

// Slots of the warp that are of the same expert and before the lane's; counts them all.
__device__ __forceinline__ void rank(const Chunk& chunk, Counts& counts, int32_t experts,
                                     int (&ranks)[kOfLane]) {
  uint16_t* const own = counts[threadIdx.x / 32];
  const unsigned below = (1u << (threadIdx.x % 32)) - 1;
  const int bits = 32 - __clz(experts);  // of nobody all are set, as of no expert
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int32_t id = chunk.ids[i];
    const unsigned peers = lanes_with(id, bits);
    const int before = id == kNobody ? 0 : own[id];
    ranks[i] = before + __popc(peers & below);
    __syncwarp();
    if (id != kNobody && (peers & below) == 0) own[id] = uint16_t(before + __popc(peers));
    __syncwarp();
  }
}

// The slots of the block's part: whole chunks, but for the last one.
struct Part {
  int64_t first, end;

  __device__ Part(int64_t slots, int parts) {
    const int64_t own = ceil_div(ceil_div(slots, kChunk), parts) * kChunk;
    first = min(int64_t(blockIdx.x) * own, slots);
    end = min(first + own, slots);
  }
};

static __global__ void __launch_bounds__(kThreads)
    count_experts(const __grid_constant__ RoutingPlanArguments in, int32_t slots, int32_t experts) {
  __shared__ Counts counts;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Part part(slots, int(gridDim.x));
  auto* const histogram = static_cast<int32_t*>(in.histograms) + int64_t(blockIdx.x) * experts;
  int32_t sums[kOfThread] = {};
  for (int64_t first = part.first; first < part.end; first += kChunk) {
    Chunk chunk;
    chunk.load(static_cast<const int32_t*>(in.ids), first, part.end, experts);
    clear(counts, experts);
    int ranks[kOfLane];
    rank(chunk, counts, experts, ranks);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int e = int(threadIdx.x) + i * kThreads;
      if (e >= experts) break;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sums[i] += counts[warp][e];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int e = int(threadIdx.x) + i * kThreads;
    if (e < experts) histogram[e] = sums[i];
  }
}

// Of each expert: where its rows begin, how many it has, and how many slots of it were before.
struct Experts {
  int32_t begin[kMostExperts], size[kMostExperts], before[kMostExperts];
  int32_t shared[kThreads];  // sums of parts, by those who share them
  uint32_t of_warp[kWarps];
};

// Sums that stay at `most`: their order does not matter, and none overflows.
__device__ __forceinline__ uint32_t add_up_to(uint32_t most, uint32_t a, uint32_t b) {
  return min(a + b, most);
}

// Rows of experts, from how many slots they have and what they may have. Returns where all rows end.
__device__ __forceinline__ int32_t lay_out(const RoutingPlanArguments& in, Experts& all,
                                           int32_t slots, int32_t experts) {
  const uint32_t most = uint32_t(slots);
  const int64_t limit = in.capacity > 0 && in.capacity < slots ? in.capacity : slots;
  uint32_t own[kOfThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int e = int(threadIdx.x) * kOfThread + i;
    const int64_t count = e < experts ? __ldg(in.counts + e) : 0;
    own[i] = uint32_t(count < 0 ? 0 : count < limit ? count : limit);
    sum = add_up_to(most, sum, own[i]);
  }
  uint32_t through = sum;  // those of lanes before it, and its own
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, through, distance);
    if (lane >= distance) through = add_up_to(most, through, before);
  }
  uint32_t begin = __shfl_up_sync(kAllLanes, through, 1);
  if (lane == 0) begin = 0;
  if (lane == 31) all.of_warp[warp] = through;
  __syncthreads();
  uint32_t end = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    if (other == warp) begin = add_up_to(most, end, begin);
    end = add_up_to(most, end, all.of_warp[other]);
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int e = int(threadIdx.x) * kOfThread + i;
    const uint32_t behind = add_up_to(most, begin, own[i]);
    if (e < experts) {
      all.begin[e] = int32_t(begin);
      all.size[e] = int32_t(behind - begin);
      if (blockIdx.x == 0) in.split_sizes[e] = int64_t(behind - begin);
    }
    begin = behind;
  }
  return int32_t(end);
}

// Slots of an expert in every `step`-th part before the block's. Loads are under way together, those
// of parts that are none left out: a loop that ends anywhere would wait for each.
__device__ __forceinline__ int32_t sum_parts(const RoutingPlanArguments& in, int32_t experts, int e,
                                             int first, int step) {
  constexpr int kAtOnce = 16;
  const auto* const from = static_cast<const int32_t*>(in.histograms) + e;
  int32_t sum = 0;
  for (int part = first; part < int(blockIdx.x); part += kAtOnce * step) {
    int32_t counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int other = part + i * step;
      counts[i] = other < int(blockIdx.x) ? __ldcg(from + other * experts) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += counts[i];
  }
  return sum;
}

// Slots of each expert in the parts before the block's, which threads share where they are more than
// experts.
__device__ __forceinline__ void add_parts(const RoutingPlanArguments& in, Experts& all,
                                          int32_t experts) {
  const auto thread = int(threadIdx.x);
  if (2 * experts > kThreads) {
    for (int e = thread; e < experts; e += kThreads) {
      all.before[e] = sum_parts(in, experts, e, 0, 1);
    }
    return;
  }
  if (experts == 0) return;
  const int sharing = kThreads / experts, own = thread / experts;
  if (own < sharing) {
    all.shared[thread] = sum_parts(in, experts, thread - own * experts, own, sharing);
  }
  __syncthreads();
  if (thread >= experts) return;
  int32_t sum = 0;
  for (int i = 0; i < sharing; ++i) sum += all.shared[i * experts + thread];
  all.before[thread] = sum;
}

// Of each of the thread's experts, its slots in a chunk that is ranked; counts become those of earlier
// warps.
__device__ __forceinline__ void sum_warps(Counts& counts, int32_t experts,
                                          int32_t (&sums)[kOfThread]) {
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int e = int(threadIdx.x) + i * kThreads;
    sums[i] = 0;
    if (e >= experts) break;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int32_t count = counts[warp][e];
      counts[warp][e] = uint16_t(sums[i]);
      sums[i] += count;
    }
  }
}

// The rows of a chunk's slots.
__device__ __forceinline__ void place(const RoutingPlanArguments& in, const Chunk& chunk,
                                      const Counts& counts, const int (&ranks)[kOfLane],
                                      const Experts& all, int64_t first, int64_t end) {
  auto* const slot_row = static_cast<int32_t*>(in.slot_row);
  auto* const row_slot = static_cast<int32_t*>(in.row_slot);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t slot = first + Chunk::place(i);
    if (slot >= end) break;
    const int32_t id = chunk.ids[i];
    int32_t row = -1;
    if (id != kNobody) {
      const int32_t place = all.before[id] + counts[threadIdx.x / 32][id] + ranks[i];
      if (place < all.size[id]) row = all.begin[id] + place;
    }
    slot_row[slot] = row;
    if (row >= 0) row_slot[row] = int32_t(slot);
  }
}

// Rows of a part's numbers that are no expert's, which nobody else writes.
__device__ __forceinline__ void clear_rows(const RoutingPlanArguments& in, const Part& part,
                                           int32_t rows) {
  auto* const row_slot = static_cast<int32_t*>(in.row_slot);
  for (int64_t row = part.first + threadIdx.x; row < part.end; row += kThreads) {
    if (row >= rows) row_slot[row] = -1;
  }
}

// Where counts say more than there are slots, rows are left over, which are empty. Of the last block,
// which knows how many slots each expert has.
__device__ __forceinline__ void clear_left_over(const RoutingPlanArguments& in, const Experts& all,
                                                int32_t experts) {
  auto* const row_slot = static_cast<int32_t*>(in.row_slot);
  for (int e = int(threadIdx.x); e < experts; e += kThreads) {
    for (int32_t place = all.before[e]; place < all.size[e]; ++place) {
      row_slot[all.begin[e] + place] = -1;
    }
  }
}

// Behind count_experts, unless there is one part. Ids and counts were there before that started, which
// lets this kernel start after its own wait: so they are read, and ranked, before it has ended.
static __global__ void __launch_bounds__(kThreads, 2)
    place_slots(const __grid_constant__ RoutingPlanArguments in, int32_t slots, int32_t experts) {
  __shared__ Counts counts;
  __shared__ Experts all;
  const bool is_counted = gridDim.x > 1;
  if (!is_counted) wait_for_previous_kernel();
  const Part part(slots, int(gridDim.x));
  const auto* const ids = static_cast<const int32_t*>(in.ids);
  Chunk chunk;
  chunk.load(ids, part.first, part.end, experts);
  const int32_t rows = lay_out(in, all, slots, experts);
  int64_t first = part.first;
  do {  // once where a part has no slots, too
    clear(counts, experts);
    int ranks[kOfLane];
    rank(chunk, counts, experts, ranks);
    __syncthreads();
    int32_t sums[kOfThread];
    sum_warps(counts, experts, sums);
    if (first == part.first) {
      if (is_counted) wait_for_previous_kernel();
      let_next_kernel_start();
      add_parts(in, all, experts);
      clear_rows(in, part, rows);
    }
    __syncthreads();
    place(in, chunk, counts, ranks, all, first, part.end);
    first += kChunk;
    chunk.load(ids, first, part.end, experts);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int e = int(threadIdx.x) + i * kThreads;
      if (e < experts) all.before[e] += sums[i];
    }
    __syncthreads();
  } while (first < part.end);
  if (blockIdx.x + 1 == gridDim.x) clear_left_over(in, all, experts);
}

}  // namespace routing

// Of whatever element type: a plan has none.
template <class Element>
static Status launch_routing_plan(const RoutingPlanArguments& in, Stream& stream) {
  using namespace routing;
  const int64_t slots = in.tokens * in.choices;
  if (slots > INT32_MAX) return {cudaErrorInvalidValue, "routing_plan: fewer than 2^31 choices"};
  if (in.experts > kMostExperts) return {cudaErrorInvalidValue, "routing_plan: 1024 experts at most"};
  const Grid grid{dim3(unsigned(in.parts > 0 ? in.parts : 1)), kThreads};
  const auto count = int32_t(slots), experts = int32_t(in.experts);
  if (in.parts > 1) {
    const Status status = launch_kernel("cudaLaunchKernelEx(routing_plan, counts)", &count_experts,
                                        grid, stream, in, count, experts);
    if (!status.ok()) return status;
  }
  return launch_kernel("cudaLaunchKernelEx(routing_plan)", &place_slots, grid, stream, in, count,
                       experts);
}

}  // namespace fusegen
