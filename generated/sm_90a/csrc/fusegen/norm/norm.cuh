// Norms of rows: y = (x - mean) rstd weight + bias, statistics in fp32.
//
// A row is read once and stays in the registers of its team, eight vectors a thread where it is
// long; the variance of a layer norm is that of deviations from the mean, which are there anyway.
// Teams are as short as the row allows: sums within a warp need no barrier, and several rows share a
// block. There are as many blocks as rows take: while some add up, others load and store.
#pragma once

#include <cmath>

#include "fusegen/norm/norm.h"
#include "fusegen/norm/rows.cuh"

namespace fusegen {

namespace norm {

// At least: 85 registers a thread, 128 where rows are longer than 16384.
template <class S>
inline constexpr int kBlocksPerSm = 768 / S::kThreads;

template <class S, bool centred>
struct Statistics {
  float mean, rstd;

  template <class Element>
  __device__ static Statistics of(uint4 (&x)[S::kVectors], int columns, float count, float eps,
                                  const Place<S>& place) {
    __shared__ float across[1 + centred][S::kThreads / kWarp][1];
    float mean = 0.0f;
    if constexpr (centred) {
      float sum[1] = {};
#pragma unroll
      for (int i = 0; i < S::kVectors; ++i) {
        const Values values = unpack<Element>(x[i]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[0] += values.of[j];
      }
      add_up<S>(sum, across[1]);
      forget_unpacked(x);
      mean = sum[0] / count;
    }
    float squares[1] = {};
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      if (place.column(i) >= columns) continue;  // a zero deviates from the mean
      const Values values = unpack<Element>(x[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float deviation = values.of[j] - mean;
        squares[0] += deviation * deviation;
      }
    }
    add_up<S>(squares, across[0]);
    forget_unpacked(x);
    return {mean, 1.0f / sqrtf(squares[0] / count + eps)};
  }

  // Where they are wanted, by the first thread of the row's team.
  __device__ __forceinline__ void store(const NormArguments& in, int64_t row,
                                        const Place<S>& place) const {
    if (place.lane != 0) return;
    if (centred && in.mean != nullptr) in.mean[row] = mean;
    if (in.rstd != nullptr) in.rstd[row] = rstd;
  }
};

// Where rows come from: memory.
template <class Element>
struct LoadRows {
  const void* x;

  template <class S>
  __device__ __forceinline__ void load(uint4 (&row)[S::kVectors], int64_t begin, int columns,
                                       bool there, const Place<S>& place) const {
    load_row<Element, S>(row, x, begin, columns, there, place);
  }
};

// Where rows go, 16 bytes at a time, as soon as they are rounded.
template <class Element>
struct StoreRows {
  Element* y;
  int64_t columns;

  __device__ void put(int64_t row, int column, const uint4& rounded) const {
    *reinterpret_cast<uint4*>(y + row * columns + column) = rounded;
  }
};

template <class Element, class S, bool centred, class Source, class Sink>
static __global__ void __launch_bounds__(S::kThreads, kBlocksPerSm<S>)
    kernel(const __grid_constant__ NormArguments in, const __grid_constant__ Source source,
           const __grid_constant__ Sink sink) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Place<S> place;
  const int columns = int(in.columns);
  const int64_t row = int64_t(blockIdx.x) * S::kRows + place.row;
  const bool there = row < in.rows;
  uint4 x[S::kVectors];
  source.template load<S>(x, row * columns, columns, there, place);

  const float count = count_of(in.kind, columns);
  const auto found =
      Statistics<S, centred>::template of<Element>(x, columns, count, in.eps, place);
  if (!there) return;
  found.store(in, row, place);
  const Gamma<Element> gamma(in.weight, in.zero_centered);
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) {
    const int column = place.column(i);
    if (column >= columns) continue;
    const Values factors = gamma(column);
    Values values = unpack<Element>(x[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      values.of[j] = (values.of[j] - found.mean) * found.rstd * factors.of[j];
    }
    if constexpr (centred) {
      const Values added = unpack<Element>(load_shared<Element>(in.bias, column));
#pragma unroll
      for (int j = 0; j < kVector; ++j) values.of[j] += added.of[j];
    }
    sink.put(row, column, pack<Element>(values));
  }
}

inline constexpr int kShortThreads = 256;
inline constexpr int kShortColumns = 16384;  // of a row that a block of so many threads holds, at most

// Calls `use` with the shape of a row that is not longer than that, on the host or the device.
#pragma nv_exec_check_disable
template <class Use>
__host__ __device__ auto with_short_shape(int64_t columns, const Use& use) {
  constexpr int kThreads = kShortThreads;
  if (columns <= 64) return use(Shape<kThreads, 8, 1>());
  if (columns <= 256) return use(Shape<kThreads, 32, 1>());
  if (columns <= 512) return use(Shape<kThreads, 32, 2>());
  if (columns <= 1024) return use(Shape<kThreads, 32, 4>());
  if (columns <= 2048) return use(Shape<kThreads, 32, 8>());
  if (columns <= 4096) return use(Shape<kThreads, 64, 8>());
  if (columns <= 8192) return use(Shape<kThreads, 128, 8>());
  static_assert(Shape<kThreads, 256, 8>::kColumns == kShortColumns);
  return use(Shape<kThreads, 256, 8>());
}

// Calls `launch` with the shape of a row.
template <class Launch>
Status with_shape(int64_t columns, const Launch& launch) {
  if (columns <= kShortColumns) return with_short_shape(columns, launch);
  if (columns <= 32768) return launch(Shape<512, 512, 8>());
  static_assert(Shape<512, 512, 16>::kColumns == kMostNormColumns);
  return launch(Shape<512, 512, 16>());
}

template <class Element, class Source, class Sink>
Status launch(const char* call, const NormArguments& in, const Source& source, const Sink& sink,
              Stream& stream) {
  const Status status = check_rows(in.rows, in.columns);
  if (!status.ok() || in.rows == 0) return status;
  return with_shape(in.columns, [&](auto shape) {
    using S = decltype(shape);
    const auto of_kind = in.kind == NormKind::layer ? &kernel<Element, S, true, Source, Sink>
                                                    : &kernel<Element, S, false, Source, Sink>;
    const Grid grid{dim3(unsigned(ceil_div(in.rows, S::kRows))), S::kThreads};
    return launch_kernel(call, of_kind, grid, stream, in, source, sink);
  });
}

}  // namespace norm

template <class Element>
static Status launch_norm(const NormArguments& in, Stream& stream) {
  const norm::LoadRows<Element> source{in.x};
  const norm::StoreRows<Element> sink{static_cast<Element*>(in.y), in.columns};
  return norm::launch<Element>("cudaLaunchKernelEx(norm)", in, source, sink, stream);
}

}  // namespace fusegen
