// The cross entropy of each row of logits with the column of its target, and the logarithm of the
// sum of the row's exponentials, in one read of the row.
//
// A warp has a row of up to 1024 logits, a CTA of 512 threads a longer one. Each thread keeps the
// largest logit it has seen and the sum of exponentials less that; where labels are smoothed, the
// sum of logits, too. Orders are fixed, so results repeat bit for bit. Rows whose target is ignored
// are not read. A target that is no column otherwise gives NaN: an error that the host sees without
// waiting for the device, and that no mean over the rows hides.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/cross_entropy.h"
#include "fusegen/softmax/limits.cuh"
#include "fusegen/softmax/running_sum.cuh"

namespace fusegen {

namespace softmax {

inline constexpr int kLogitVectors = 4;  // 16 bytes each, that a thread has at once

// What a thread knows of the logits that it has read.
struct LogitSums {
  RunningSum exponentials;
  float logits = 0.0f;

  // Vectors `first`, `first + step`, ... of a row of `count`; with `kAll` it has all of them.
  template <class Element, bool kAll>
  __device__ __forceinline__ void add(const uint4* x, int first, int step, int count,
                                      bool sums_logits) {
    uint4 packed[kLogitVectors];
#pragma unroll
    for (int v = 0; v < kLogitVectors; ++v) {
      packed[v] = kAll || first + v * step < count ? __ldg(x + first + v * step) : uint4{};
    }
    float values[kLogitVectors][kVector];
#pragma unroll
    for (int v = 0; v < kLogitVectors; ++v) row::unpack<Element>(packed[v], values[v]);
    if (sums_logits) add_logits(values);
#pragma unroll
    for (int v = 0; v < kLogitVectors; ++v) {
      const bool left_out = !kAll && first + v * step >= count;
#pragma unroll
      for (float& value : values[v]) value = left_out ? -INFINITY : value;
    }
    exponentials.add(values);
  }

 private:
  __device__ __forceinline__ void add_logits(const float (&values)[kLogitVectors][kVector]) {
#pragma unroll
    for (int v = 0; v < kLogitVectors; ++v) {
#pragma unroll
      for (float value : values[v]) logits += value;
    }
  }
};

// The loss of a row from its sums. What a factor of 0 leaves out may be infinite.
template <class Element>
__device__ __forceinline__ float loss_of(const CrossEntropyArguments& in, const Element* x,
                                         int64_t target, float lse, float logits) {
  if (target < 0 || target >= in.columns) return NAN;
  float loss = lse - (1.0f - in.label_smoothing) * row::widen(x[target]);
  if (in.label_smoothing != 0.0f) loss -= in.label_smoothing * (logits / float(in.columns));
  if (in.z_loss != 0.0f) loss += in.z_loss * (lse * lse);
  return loss;
}

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, Team::kCtasPerSm)
    losses(const __grid_constant__ CrossEntropyArguments in) {
  __shared__ typename Team::Partial of_largest, of_exponentials, of_logits;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = Team::index();
  if (index >= in.rows) return;
  const int64_t target = __ldg(in.targets + index);
  if (target == in.ignore_index) {
    if (Team::thread() != 0) return;
    in.loss[index] = 0.0f;
    if (in.lse != nullptr) in.lse[index] = 0.0f;
    return;
  }
  const auto* const x = static_cast<const Element*>(in.x) + index * in.columns;
  const auto* const vectors = reinterpret_cast<const uint4*>(x);
  const int count = int(in.columns) / kVector;
  const bool smooths = in.label_smoothing != 0.0f;
  LogitSums own;
  int first = Team::thread();
#pragma unroll 1
  for (; first + (kLogitVectors - 1) * Team::kSize < count; first += kLogitVectors * Team::kSize) {
    own.add<Element, true>(vectors, first, Team::kSize, count, smooths);
  }
  if (first < count) own.add<Element, false>(vectors, first, Team::kSize, count, smooths);
  const float largest = Team::reduce(own.exponentials.largest, row::Max(), of_largest);
  const float sum =
      Team::reduce(own.exponentials.sum_less(largest), row::Sum(), of_exponentials);
  const float logits = smooths ? Team::reduce(own.logits, row::Sum(), of_logits) : 0.0f;
  if (Team::thread() != 0) return;
  const float lse = shift_of(largest) + logf(sum);
  in.loss[index] = loss_of(in, x, target, lse, logits);
  if (in.lse != nullptr) in.lse[index] = lse;
}

}  // namespace softmax

template <class Element>
static Status launch_cross_entropy(const CrossEntropyArguments& in, Stream& stream) {
  using Warp = row::Team<32>;
  using Cta = row::Team<512>;
  constexpr const char* kCall = "cudaLaunchKernelEx(cross_entropy)";
  const Status status = softmax::check_sizes(in.rows, in.columns);
  if (!status.ok() || in.rows == 0) return status;
  if (in.columns <= softmax::width<Warp>(softmax::kLogitVectors)) {
    const Grid grid{dim3(unsigned(Warp::ctas(in.rows))), Warp::kCta};
    return launch_kernel(kCall, &softmax::losses<Element, Warp>, grid, stream, in);
  }
  const Grid grid{dim3(unsigned(Cta::ctas(in.rows))), Cta::kCta};
  return launch_kernel(kCall, &softmax::losses<Element, Cta>, grid, stream, in);
}

}  // namespace fusegen
