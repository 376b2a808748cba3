// Quantises norms of rows, which themselves are neither written nor read: one kernel finds the
// statistics of all rows, the quantise kernel norms the elements of its tiles, rounded as the norm's
// kernel stores them.
#pragma once

#include "fusegen/norm/norm.cuh"
#include "fusegen/norm/norm_quantize.h"
#include "fusegen/quantize/step.cuh"

namespace fusegen {

namespace norm {

// Where rows go that are wanted for their statistics alone.
struct DropRows {
  __device__ void put(int64_t, int, const uint4&) const {}
};

}  // namespace norm

namespace quantizing {

template <class Element_>
struct NormSource {
  using Element = Element_;
  static constexpr int kBlocksPerSm = 4;  // that its registers leave room for

  NormArguments norm;  // with the statistics of all rows

  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments& in, int64_t row,
                                       int column, int rows) const {
    const Input input{norm.x, in.columns};
    TensorSource<Element>().load(values, input, row, column, rows);
    const Columns of_lane(norm, min(column, int(in.columns) - kLaneColumns));
    const int lane = threadIdx.x % 32, own = min(lane % kWarpRows, rows - 1);
    float mean = 0.0f, rstd = 0.0f;  // of row `lane`, as far as there are rows
    if (rows > 0) {
      rstd = __ldcg(norm.rstd + row + own);
      if (norm.kind == NormKind::layer) mean = __ldcg(norm.mean + row + own);
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float row_mean = __shfl_sync(kAll, mean, r), row_rstd = __shfl_sync(kAll, rstd, r);
      if (r >= rows || column >= in.columns) continue;  // zeros
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2];
        row::widen(values.pairs[r][i], pair, Element());
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          pair[c] = (pair[c] - row_mean) * row_rstd * of_lane.gamma[2 * i + c] +
                    of_lane.bias[2 * i + c];
        }
        values.pairs[r][i] = round_pair(pair[0], pair[1], Element());
      }
    }
  }

 private:
  struct Input {
    const void* input;
    int64_t columns;
  };

  // Of a lane's columns. Minus zero changes nothing that it is added to, not even zeros, and zero
  // does: a layer norm adds that where it has no bias.
  struct Columns {
    float gamma[kLaneColumns], bias[kLaneColumns];

    __device__ __forceinline__ Columns(const NormArguments& norm, int column) {
      const bool centred = norm.kind == NormKind::layer;
      load(norm.weight, column, gamma, 0.0f);
      load(norm.bias, column, bias, centred ? 0.0f : -0.0f);
      const float added = norm.weight == nullptr || norm.zero_centered ? 1.0f : 0.0f;
#pragma unroll
      for (float& each : gamma) each += added;
    }

    __device__ __forceinline__ static void load(const void* from, int column,
                                                float (&to)[kLaneColumns], float otherwise) {
      if (from == nullptr) {
#pragma unroll
        for (float& each : to) each = otherwise;
        return;
      }
      const auto* const at =
          reinterpret_cast<const uint2*>(static_cast<const Element*>(from) + column);
      const uint2 pairs = __ldg(at);
      row::widen(pairs.x, to, Element());
      row::widen(pairs.y, to + 2, Element());
    }
  };
};

}  // namespace quantizing

template <class Config>
static Status launch_norm_quantize(const NormQuantizeArguments& in, Stream& stream) {
  using Element = typename Config::Element;
  NormArguments rows = in.norm;
  if (rows.mean == nullptr) rows.mean = in.statistics;
  if (rows.rstd == nullptr) rows.rstd = in.statistics + rows.rows;
  const norm::LoadRows<Element> from{rows.x};
  const Status status = norm::launch<Element>("cudaLaunchKernelEx(statistics of rows)", rows, from,
                                              norm::DropRows(), stream);
  if (!status.ok() || !in.quantizes) return status;
  return launch_quantize_step<Config>(in.step, stream, quantizing::NormSource<Element>{rows});
}

}  // namespace fusegen
