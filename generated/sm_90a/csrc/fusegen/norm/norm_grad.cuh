// Gradients of norms of rows: of the input, and of weight and bias, which are sums over all rows.
//
// Up to 16384 columns x and dy are read once. A fixed number of blocks, the parts, share the rows:
// part p has rows p * R to p * R + R, where R teams of a block have one each, and every parts * R-th
// behind them. A thread has the same columns of all of its rows. What it adds up of them lies in
// shared memory, as eight fp32 sums for each vector of two tensors would not leave registers for the
// next row, which is loaded while this one is computed. At its end a block adds the sums of its teams
// and leaves them to a second kernel, which adds those of the parts. Every order is fixed, and how
// many parts there are depends on sizes alone: results repeat bit for bit, on every GPU.
//
// Longer rows do not fit: one kernel reads each twice, for dx, and another sums up strips of columns.
#pragma once

#include <algorithm>
#include <atomic>

#include "fusegen/launch/cta_memory.h"
#include "fusegen/launch/shared_memory.cuh"
#include "fusegen/norm/norm_grad.h"
#include "fusegen/norm/rows.cuh"

namespace fusegen {

namespace norm {

inline constexpr int kColumnsReadOnce = 16384;  // of a row, at most
inline constexpr int kGradThreads = 512;

// Which sums over rows are wanted, and where those of a part lie.
struct Sums {
  bool weight, bias;

  __device__ __host__ explicit Sums(const NormGradArguments& in)
      : weight(in.dweight != nullptr), bias(in.dbias != nullptr) {}

  __device__ __host__ int count() const { return weight + bias; }
};

// What follows from statistics of a row: n = scale x + shift.
struct Row {
  float scale, shift;

  __device__ Row(const NormGradArguments& in, int64_t row, bool there)
      : scale(there ? __ldg(in.rstd + row) : 0.0f),
        shift(there && in.mean != nullptr ? -__ldg(in.mean + row) * scale : 0.0f) {}

  __device__ __forceinline__ float normed(float x) const { return fmaf(x, scale, shift); }
};

template <class Element, bool centred>
__device__ __forceinline__ void add_products(float (&sums)[1 + centred], const Row& row,
                                             const uint4& x, const uint4& dy,
                                             const Values& gamma) {
  const Values input = unpack<Element>(x), gradient = unpack<Element>(dy);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float scaled = gradient.of[j] * gamma.of[j];
    sums[0] = fmaf(scaled, row.normed(input.of[j]), sums[0]);
    if constexpr (centred) sums[1] += scaled;
  }
}

template <class Element, bool centred>
__device__ __forceinline__ uint4 input_gradient(const Row& row, const float (&means)[1 + centred],
                                                const uint4& x, const uint4& dy,
                                                const Values& gamma) {
  const Values input = unpack<Element>(x), gradient = unpack<Element>(dy);
  Values result;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    float value = gradient.of[j] * gamma.of[j] - row.normed(input.of[j]) * means[0];
    if constexpr (centred) value -= means[1];
    result.of[j] = row.scale * value;
  }
  return pack<Element>(result);
}

// Sums of columns in shared memory: two vectors of four to each vector of a thread, those of
// neighbouring threads beside each other.
template <class S>
struct ColumnSums {
  static constexpr int kOfRow = S::kTeam * S::kVectors * 2;    // vectors of four
  static constexpr int kBytes = S::kRows * kOfRow * int(sizeof(float4));

  float4* own;

  __device__ ColumnSums(float4* shared, const Place<S>& place)
      : own(shared + place.row * kOfRow + place.lane) {}

  __device__ void clear() const {
#pragma unroll
    for (int i = 0; i < 2 * S::kVectors; ++i) own[i * S::kTeam] = make_float4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void add(int i, const Values& terms) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4& to = own[(2 * i + half) * S::kTeam];
      float4 sum = to;
      sum.x += terms.of[4 * half];
      sum.y += terms.of[4 * half + 1];
      sum.z += terms.of[4 * half + 2];
      sum.w += terms.of[4 * half + 3];
      to = sum;
    }
  }

  // The sums of a block's rows, in their order, as fp32 of a row of columns.
  __device__ static void put(const float4* shared, float* to, int columns) {
    for (int at = threadIdx.x; at < kOfRow; at += S::kThreads) {
      const int lane = at % S::kTeam, half = at / S::kTeam % 2, i = at / S::kTeam / 2;
      const int column = (i * S::kTeam + lane) * kVector + half * 4;
      if (column >= columns) continue;
      float4 sum = shared[at];
#pragma unroll 4
      for (int row = 1; row < S::kRows; ++row) {
        const float4 more = shared[row * kOfRow + at];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      *reinterpret_cast<float4*>(to + column) = sum;
    }
  }
};

// One row of x and of dy, and its statistics, as a thread has them.
template <class Element, class S>
struct Loaded {
  uint4 x[S::kVectors], dy[S::kVectors];
  Row row;

  __device__ __forceinline__ Loaded(const NormGradArguments& in, int64_t at, const Place<S>& place)
      : row(in, at, at < in.rows) {
    const int columns = int(in.columns);
    load_row<Element, S>(x, in.x, at * columns, columns, at < in.rows, place);
    load_row<Element, S>(dy, in.dy, at * columns, columns, at < in.rows, place);
  }
};

// Grid (parts). `adds`: whether something is added to dx, which is loaded before the sums of its row,
// and used behind them: registers for that of the next row, too, are not left.
template <class Element, class S, bool centred, bool adds>
static __global__ void __launch_bounds__(S::kThreads, 1)
    grad_kernel(const __grid_constant__ NormGradArguments in) {
  extern __shared__ float4 column_sums[];
  __shared__ float across[2][S::kThreads / kWarp][1 + centred];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Place<S> place;
  const Sums wanted(in);
  const int columns = int(in.columns);
  const float count = count_of(in.kind, columns);
  const Gamma<Element> gamma(in.weight, in.zero_centered);
  const ColumnSums<S> of_weight(column_sums, place);
  float4* const bias_sums = column_sums + (wanted.weight ? S::kRows * ColumnSums<S>::kOfRow : 0);
  const ColumnSums<S> of_bias(bias_sums, place);
  if (wanted.weight) of_weight.clear();
  if (wanted.bias) of_bias.clear();

  const int64_t step = int64_t(gridDim.x) * S::kRows;
  int64_t first = int64_t(blockIdx.x) * S::kRows;
  Loaded<Element, S> next(in, first + place.row, place);
  for (int turn = 0; first < in.rows; first += step, turn ^= 1) {
    const Loaded<Element, S> now = next;
    if (first + step < in.rows) next = Loaded<Element, S>(in, first + step + place.row, place);
    const int64_t row = first + place.row;
    const bool writes = in.dx != nullptr && row < in.rows;
    [[maybe_unused]] uint4 added[S::kVectors];
    if constexpr (adds) {
      load_row<Element, S>(added, in.add, row * columns, columns, writes, place);
    }
    float means[1 + centred] = {};
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      const int column = place.column(i);
      if (column >= columns) continue;
      add_products<Element, centred>(means, now.row, now.x[i], now.dy[i], gamma(column));
    }
    add_up<S>(means, across[turn]);
#pragma unroll
    for (int i = 0; i < 1 + centred; ++i) means[i] /= count;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      const int column = place.column(i);
      if (column >= columns) continue;
      if (writes) {
        uint4 dx = input_gradient<Element, centred>(now.row, means, now.x[i], now.dy[i],
                                                    gamma(column));
        if constexpr (adds) dx = plus<Element>(dx, added[i]);
        auto* const to = static_cast<Element*>(in.dx) + row * columns + column;
        *reinterpret_cast<uint4*>(to) = dx;
      }
      const Values gradient = unpack<Element>(now.dy[i]);
      if (wanted.weight) {
        Values terms = unpack<Element>(now.x[i]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) terms.of[j] = gradient.of[j] * now.row.normed(terms.of[j]);
        of_weight.add(i, terms);
      }
      if (wanted.bias) of_bias.add(i, gradient);
    }
  }
  if (wanted.count() == 0) return;
  __syncthreads();
  float* const to = in.partials + int64_t(blockIdx.x) * wanted.count() * columns;
  if (wanted.weight) ColumnSums<S>::put(column_sums, to, columns);
  if (wanted.bias) ColumnSums<S>::put(bias_sums, to + (wanted.weight ? columns : 0), columns);
}

// dx of rows that no block can keep; a block has one row at a time, grid (rows).
template <class Element, bool centred>
static __global__ void __launch_bounds__(1024)
    long_rows_kernel(const __grid_constant__ NormGradArguments in) {
  using S = Shape<1024, 1024, 1>;
  __shared__ float across[S::kThreads / kWarp][1 + centred];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Place<S> place;
  const int columns = int(in.columns);
  const int64_t begin = int64_t(blockIdx.x) * columns;
  const Row row(in, blockIdx.x, true);
  const Gamma<Element> gamma(in.weight, in.zero_centered);
  float means[1 + centred] = {};
#pragma unroll 2
  for (int column = place.column(0); column < columns; column += S::kColumns) {
    add_products<Element, centred>(means, row, load_vector<Element>(in.x, begin + column),
                                   load_vector<Element>(in.dy, begin + column), gamma(column));
  }
  add_up<S>(means, across);
#pragma unroll
  for (int i = 0; i < 1 + centred; ++i) means[i] /= count_of(in.kind, columns);
#pragma unroll 2
  for (int column = place.column(0); column < columns; column += S::kColumns) {
    uint4 result = input_gradient<Element, centred>(
        row, means, load_vector<Element>(in.x, begin + column),
        load_vector<Element>(in.dy, begin + column), gamma(column));
    if (in.add != nullptr) {
      result = plus<Element>(result, load_vector<Element>(in.add, begin + column));
    }
    *reinterpret_cast<uint4*>(static_cast<Element*>(in.dx) + begin + column) = result;
  }
}

inline constexpr int kStrip = kWarp * kVector;  // columns that a warp reads of a row at once
inline constexpr int kStripThreads = 256;
inline constexpr int kStripRows = kStripThreads / kWarp;
inline constexpr int64_t kStripParts = 8;
static_assert(kStripParts <= kNormParts);

// Sums of a strip of columns over a part of the rows; grid (columns / 256, parts).
template <class Element>
static __global__ void __launch_bounds__(kStripThreads)
    strip_kernel(const __grid_constant__ NormGradArguments in) {
  __shared__ float shared[kStripRows][2][kStrip];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Sums wanted(in);
  const int columns = int(in.columns);
  const int warp = threadIdx.x / kWarp, own = threadIdx.x % kWarp * kVector;
  const int column = int(blockIdx.x) * kStrip + own;
  float weight[kVector] = {}, bias[kVector] = {};
  const int64_t step = int64_t(gridDim.y) * kStripRows;
#pragma unroll 4
  for (int64_t at = int64_t(blockIdx.y) * kStripRows + warp; at < in.rows; at += step) {
    if (column >= columns) break;
    const Row row(in, at, true);
    const Values gradient = unpack<Element>(load_vector<Element>(in.dy, at * columns + column));
    const Values input = unpack<Element>(load_vector<Element>(in.x, at * columns + column));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      weight[j] = fmaf(gradient.of[j], row.normed(input.of[j]), weight[j]);
      bias[j] += gradient.of[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    shared[warp][0][own + j] = weight[j];
    shared[warp][1][own + j] = bias[j];
  }
  __syncthreads();
  const int summed = int(blockIdx.x) * kStrip + int(threadIdx.x);
  static_assert(kStripThreads == kStrip, "one column to a thread");
  if (summed >= columns) return;
  float* const to = in.partials + int64_t(blockIdx.y) * wanted.count() * columns + summed;
  for (int sum = wanted.weight ? 0 : 1; sum < 1 + wanted.bias; ++sum) {
    float total = shared[0][sum][threadIdx.x];
#pragma unroll
    for (int row = 1; row < kStripRows; ++row) total += shared[row][sum][threadIdx.x];
    to[wanted.weight ? sum * columns : 0] = total;
  }
}

inline constexpr int kAdders = 8;  // of a column

// The sums of all parts: one column to a lane, every eighth part to a warp, then those of the warps.
template <class Element>
static __global__ void __launch_bounds__(kAdders* kWarp)
    add_parts_kernel(const __grid_constant__ NormGradArguments in, int parts) {
  __shared__ float shared[kAdders][kWarp];
  const Sums wanted(in);
  const int columns = int(in.columns);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = int(blockIdx.x) * kWarp + lane, all = wanted.count() * columns;
  wait_for_previous_kernel();
  let_next_kernel_start();
  float sum = 0.0f;
  if (column < all) {
#pragma unroll 8
    for (int part = warp; part < parts; part += kAdders) {
      sum += in.partials[int64_t(part) * all + column];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= all) return;
#pragma unroll
  for (int i = 1; i < kAdders; ++i) sum += shared[i][lane];
  const bool of_weight = wanted.weight && column < columns;
  void* const to = of_weight ? in.dweight : in.dbias;
  narrow(sum, static_cast<Element*>(to) + (column < columns ? column : column - columns));
}

// Calls `launch` with the shape of a row.
template <class Launch>
Status with_grad_shape(int64_t columns, const Launch& launch) {
  if (columns <= 64) return launch(Shape<kGradThreads, 8, 1>());
  if (columns <= 256) return launch(Shape<kGradThreads, 32, 1>());
  if (columns <= 512) return launch(Shape<kGradThreads, 32, 2>());
  if (columns <= 1024) return launch(Shape<kGradThreads, 32, 4>());
  if (columns <= 2048) return launch(Shape<kGradThreads, 64, 4>());
  if (columns <= 4096) return launch(Shape<kGradThreads, 128, 4>());
  if (columns <= 8192) return launch(Shape<kGradThreads, 256, 4>());
  static_assert(Shape<kGradThreads, 512, 4>::kColumns == kColumnsReadOnce);
  return launch(Shape<kGradThreads, 512, 4>());
}

template <class Element, class S, bool centred, bool adds>
Status launch_rows(const NormGradArguments& in, int parts, Stream& stream) {
  static std::atomic<uint64_t> allowed{0};
  const auto kernel = &grad_kernel<Element, S, centred, adds>;
  const int most = std::min((1 + centred) * ColumnSums<S>::kBytes, cta_shared_memory());
  Status status = allow_shared_memory(kernel, most, allowed);
  if (!status.ok()) return status;
  Grid grid{dim3(unsigned(parts)), S::kThreads};
  grid.shared_bytes = Sums(in).count() * ColumnSums<S>::kBytes;
  return launch_kernel("cudaLaunchKernelEx(norm_grad)", kernel, grid, stream, in);
}

template <class Element, class S>
Status launch_rows(const NormGradArguments& in, int parts, Stream& stream) {
  if (in.kind == NormKind::layer) {
    return in.add != nullptr ? launch_rows<Element, S, true, true>(in, parts, stream)
                             : launch_rows<Element, S, true, false>(in, parts, stream);
  }
  return in.add != nullptr ? launch_rows<Element, S, false, true>(in, parts, stream)
                           : launch_rows<Element, S, false, false>(in, parts, stream);
}

template <class Element>
Status launch_long_rows(const NormGradArguments& in, int parts, Stream& stream) {
  constexpr const char* kCall = "cudaLaunchKernelEx(norm_grad of long rows)";
  Status status;
  if (in.dx != nullptr) {
    const auto kernel = in.kind == NormKind::layer ? &long_rows_kernel<Element, true>
                                                   : &long_rows_kernel<Element, false>;
    status = launch_kernel(kCall, kernel, Grid{dim3(unsigned(in.rows)), 1024}, stream, in);
  }
  if (!status.ok() || Sums(in).count() == 0) return status;
  const Grid grid{dim3(unsigned(ceil_div(in.columns, kStrip)), unsigned(parts)), kStripThreads};
  return launch_kernel(kCall, &strip_kernel<Element>, grid, stream, in);
}

// Whether a block has room for the sums of weight and bias at once.
inline bool both_sums_fit(int64_t columns) {
  if (columns > kColumnsReadOnce) return true;  // they lie in registers
  bool fit = true;
  (void)with_grad_shape(columns, [&](auto shape) {
    fit = 2 * ColumnSums<decltype(shape)>::kBytes <= cta_shared_memory();
    return Status();
  });
  return fit;
}

}  // namespace norm

template <class Element>
static Status launch_norm_grad(const NormGradArguments& in, Stream& stream) {
  if (norm::Sums(in).count() == 2 && !norm::both_sums_fit(in.columns)) {
    // One at a time, which reads x and dy twice: neither sum depends on the other.
    NormGradArguments first = in, second = in;
    first.dbias = nullptr;
    second.dx = second.dweight = nullptr;
    const Status done = launch_norm_grad<Element>(first, stream);
    return done.ok() ? launch_norm_grad<Element>(second, stream) : done;
  }
  Status status = norm::check_rows(in.rows, in.columns);
  if (!status.ok()) return status;
  const int sums = norm::Sums(in).count();
  if (sums > 0 && (in.partials == nullptr || in.parts != kNormParts)) {
    return {static_cast<int>(cudaErrorInvalidValue), "partials of 132 parts"};
  }
  int parts = 0;
  if (in.rows > 0 && in.columns > norm::kColumnsReadOnce) {
    parts = int(std::min(norm::ceil_div(in.rows, norm::kStripRows), norm::kStripParts));
    status = norm::launch_long_rows<Element>(in, parts, stream);
  } else if (in.rows > 0) {
    status = norm::with_grad_shape(in.columns, [&](auto shape) {
      using S = decltype(shape);
      parts = int(std::min(norm::ceil_div(in.rows, S::kRows), kNormParts));
      return norm::launch_rows<Element, S>(in, parts, stream);
    });
  }
  if (!status.ok() || sums == 0) return status;
  const Grid grid{dim3(unsigned(norm::ceil_div(sums * in.columns, norm::kWarp))),
                  norm::kAdders * norm::kWarp};
  return launch_kernel("cudaLaunchKernelEx(norm_grad, parts)", &norm::add_parts_kernel<Element>,
                       grid, stream, in, parts);
}

}  // namespace fusegen
