// The largest values of a row, one after the other, by the lanes of a warp.
//
// Values are compared by keys: unsigned numbers in the order of floats, so that the largest of all
// lanes takes one instruction, the first lane that has it another. 0 is what is no longer there.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/router/logits.cuh"

namespace fusegen {

namespace router {

inline constexpr uint32_t kNanKey = 0xffffffffu;

// NaN is the largest; zeros are equal.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t flipped = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return value != value ? kNanKey : flipped;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  if (key == kNanKey) return NAN;
  return __uint_as_float(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

// The first lane that has the largest key, and that key.
struct Winner {
  uint32_t key;
  int lane;

  __device__ explicit Winner(uint32_t own) {
    key = __reduce_max_sync(kAllLanes, own);
    lane = __ffs(int(__ballot_sync(kAllLanes, own == key))) - 1;
  }
};

// The first of a lane's largest keys.
template <int kValues>
struct Best {
  uint32_t key = 0;
  int index = 0;

  __device__ explicit Best(const uint32_t (&keys)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (keys[i] <= key) continue;
      key = keys[i];
      index = i;
    }
  }
};

template <int kValues>
__device__ __forceinline__ void take(uint32_t (&keys)[kValues], int index) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) keys[i] = i == index ? 0 : keys[i];
}

// The experts of a lane by groups of neighbours.
struct Groups {
  int count, kept, top, size, experts;

  __device__ explicit Groups(const RouteArguments& in)
      : count(int(in.groups)),
        kept(int(in.kept_groups)),
        top(int(in.group_top)),
        size(int(in.experts / in.groups)),
        experts(int(in.experts)) {}

  // Sets the keys of experts in groups that are not kept to 0.
  template <int kValues>
  __device__ void keep_best(uint32_t (&keys)[kValues], int first) const {
    uint32_t own = 0;  // a group's for each lane
    for (int group = 0; group < count; ++group) {
      const uint32_t key = key_of(sum_of_best(keys, group * size - first));
      own = lane_of_warp() == group ? key : own;
    }
    uint32_t best = 0;  // a bit for each group
    for (int i = 0; i < kept; ++i) {
      const Winner winner(own);
      best |= 1u << winner.lane;
      own = lane_of_warp() == winner.lane ? 0 : own;
    }
    int group = first / size, end = (group + 1) * size - first;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i == end) {
        ++group;
        end += size;
      }
      keys[i] = best >> group % kWarp & 1 ? keys[i] : 0;
    }
  }

 private:
  // Of a group that begins `begin` values behind the lane's first, largest first.
  template <int kValues>
  __device__ float sum_of_best(const uint32_t (&keys)[kValues], int begin) const {
    uint32_t members[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      members[i] = i >= begin && i < begin + size ? keys[i] : 0;
    }
    Best<kValues> best(members);
    float sum = 0.0f;
    for (int i = 0; i < top; ++i) {
      const Winner winner(best.key);
      if (winner.key == 0) break;
      sum += value_of(winner.key);
      if (i + 1 == top || lane_of_warp() != winner.lane) continue;
      take(members, best.index);
      best = Best<kValues>(members);
    }
    return sum;
  }
};

}  // namespace router

}  // namespace fusegen
