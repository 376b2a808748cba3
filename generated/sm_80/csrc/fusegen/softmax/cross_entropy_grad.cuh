// The gradient of the cross entropy: of each row, dloss times what softmax and target differ by.
//
// The forward left the logarithm of the sum of each row's exponentials, so every vector stands for
// itself: rows are cut into pieces of 8192 logits, a CTA of 256 threads each; of rows of up to 1024
// a warp has one. Rows whose target is ignored are zero, and nothing of them is read.
//
// The gradient may lie where the logits do: a thread has read a vector before it writes it, and no
// other thread reads it. So loads are plain ones: those past the L1 cache's coherence are for what no
// kernel writes meanwhile.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"
#include "fusegen/softmax/cross_entropy.h"
#include "fusegen/softmax/exponential.cuh"
#include "fusegen/softmax/limits.cuh"

namespace fusegen {

namespace softmax {

inline constexpr int kPieceVectors = 4;  // 16 bytes each, that a thread has

// What the gradient of a row's logits consists of: factor * exp(x - lse) - smoothed, and less `hit`
// in the column of the target.
struct RowGradient {
  float lse, factor, smoothed, hit;

  __device__ RowGradient(const CrossEntropyGradArguments& in, int64_t row, int64_t target) {
    const bool is_column = target >= 0 && target < in.columns;
    const float dloss = is_column ? __ldg(in.dloss + row) : NAN;
    lse = __ldg(in.lse + row);
    factor = dloss * (1.0f + 2.0f * in.z_loss * lse);
    smoothed = dloss * (in.label_smoothing / float(in.columns));
    hit = dloss * (1.0f - in.label_smoothing);
  }
};

template <class Element>
__device__ __forceinline__ uint4 gradient_of(const uint4& packed, const RowGradient& row,
                                             int target) {
  float values[row::kVector];
  row::unpack<Element>(packed, values);
#pragma unroll
  for (float& value : values) value = row.factor * exponential(value, row.lse) - row.smoothed;
  if (target >= 0 && target < row::kVector) {
#pragma unroll
    for (int i = 0; i < row::kVector; ++i) {
      if (i == target) values[i] -= row.hit;
    }
  }
  return row::pack<Element>(values);
}

template <class Element, class Team>
static __global__ void __launch_bounds__(Team::kCta, Team::kCtasPerSm)
    logit_gradients(const __grid_constant__ CrossEntropyGradArguments in, uint32_t pieces_per_row,
                    uint32_t pieces) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const uint32_t index = uint32_t(Team::index());
  if (index >= pieces) return;
  const uint32_t row = index / pieces_per_row;
  const int first = int(index % pieces_per_row) * kPieceVectors * Team::kSize + Team::thread();
  const int count = int(in.columns) / row::kVector;
  const auto* const x =
      reinterpret_cast<const uint4*>(static_cast<const Element*>(in.x) + row * in.columns);
  auto* const dx = reinterpret_cast<uint4*>(static_cast<Element*>(in.dx) + row * in.columns);
  const int64_t target = __ldg(in.targets + row);
  if (target == in.ignore_index) {
#pragma unroll
    for (int v = 0; v < kPieceVectors; ++v) {
      if (first + v * Team::kSize < count) dx[first + v * Team::kSize] = uint4{};
    }
    return;
  }
  uint4 packed[kPieceVectors];
#pragma unroll
  for (int v = 0; v < kPieceVectors; ++v) {
    const int vector = first + v * Team::kSize;
    packed[v] = vector < count ? x[vector] : uint4{};
  }
  const RowGradient gradient(in, row, target);
#pragma unroll
  for (int v = 0; v < kPieceVectors; ++v) {
    const int vector = first + v * Team::kSize;
    if (vector >= count) continue;
    const int hit = target < in.columns ? int(target) - vector * row::kVector : -1;
    dx[vector] = gradient_of<Element>(packed[v], gradient, hit);
  }
}

template <class Element, class Team>
Status launch_pieces(const CrossEntropyGradArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const int64_t piece = width<Team>(kPieceVectors);
  const int64_t pieces_per_row = ceil_div(in.columns, piece);
  const int64_t pieces = in.rows * pieces_per_row;
  if (pieces > INT32_MAX) return {kInvalid, "pieces of 8192 logits: fewer than 2^31"};
  const Grid grid{dim3(unsigned(Team::ctas(pieces))), Team::kCta};
  return launch_kernel("cudaLaunchKernelEx(cross_entropy_grad)", &logit_gradients<Element, Team>,
                       grid, stream, in, uint32_t(pieces_per_row), uint32_t(pieces));
}

}  // namespace softmax

template <class Element>
static Status launch_cross_entropy_grad(const CrossEntropyGradArguments& in, Stream& stream) {
  const Status status = softmax::check_sizes(in.rows, in.columns);
  if (!status.ok() || in.rows == 0) return status;
  if (in.columns <= softmax::width<row::Team<32>>(softmax::kPieceVectors)) {
    return softmax::launch_pieces<Element, row::Team<32>>(in, stream);
  }
  return softmax::launch_pieces<Element, row::Team<256>>(in, stream);
}

}  // namespace fusegen
