// Gradients of norms of rows: of the input, and of weight and bias, which are sums over all rows.
//
// Up to 16384 columns x and dy are read once. A fixed number of blocks, the parts, share the rows:
// part p has rows p * R to p * R + R, where R teams of a block have one each, and every parts * R-th
// behind them. A thread has the same columns of all of its rows, of which the next ones are copied
// into shared memory while it computes. Its sums are registers; where both weight and bias have some,
// those for the bias lie in shared memory, too. At its end a block adds the sums of its teams and
// leaves them to a second kernel, which adds those of the parts. Every order is fixed, and how many
// parts there are depends on sizes alone: results repeat bit for bit, on every GPU.
//
// Longer rows do not fit: one kernel reads each twice, for dx, and another sums up strips of columns.
#pragma once

#include <algorithm>
#include <atomic>

#include "fusegen/launch/cta_memory.h"
#include "fusegen/launch/shared_memory.cuh"
#include "fusegen/load/own_copies.cuh"
#include "fusegen/norm/norm_grad.h"
#include "fusegen/norm/rows.cuh"

namespace fusegen {

namespace norm {

inline constexpr int kColumnsReadOnce = 16384;  // of a row, at most
inline constexpr int kAlwaysShared = 1 << 10;  // bytes of a block's, at most, that no launch sizes

// Which sums over rows are wanted, and where those of a part lie.
struct Sums {
  bool weight, bias;

  __device__ __host__ explicit Sums(const NormGradArguments& in)
      : weight(in.dweight != nullptr), bias(in.dbias != nullptr) {}

  __device__ __host__ int count() const { return weight + bias; }
  __device__ __host__ bool both() const { return weight && bias; }
};

// Statistics of a row as they are loaded: nothing here waits for them.
struct RowStatistics {
  float mean, rstd;

  // `centred`: whether rows have a mean.
  __device__ RowStatistics(const NormGradArguments& in, int64_t row, bool there, bool centred)
      : mean(there && centred ? __ldg(in.mean + row) : 0.0f),
        rstd(there ? __ldg(in.rstd + row) : 0.0f) {}
};

// What follows from them: n = scale x + shift.
struct Row {
  float scale, shift;

  __device__ explicit Row(const RowStatistics& of) : scale(of.rstd), shift(0.0f - of.mean * of.rstd) {}

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

__device__ __forceinline__ Values products(const Values& a, const Values& b) {
  Values result;
#pragma unroll
  for (int j = 0; j < kVector; ++j) result.of[j] = a.of[j] * b.of[j];
  return result;
}

// From g of a vector's elements.
template <class Element, bool centred>
__device__ __forceinline__ uint4 input_gradient(const Row& row, const float (&means)[1 + centred],
                                                const Values& input, const Values& scaled) {
  Values result;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    float value = scaled.of[j] - row.normed(input.of[j]) * means[0];
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

  __device__ void set(int i, const Values& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const from = sums.of + 4 * half;
      own[(2 * i + half) * S::kTeam] = make_float4(from[0], from[1], from[2], from[3]);
    }
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

  // The sums of a block's rows, in their order, as fp32 of a row of columns. Neighbouring threads
  // write neighbouring bytes: half sectors would take as long as whole ones.
  __device__ static void put(const float4* shared, float* to, int columns) {
    for (int column = int(threadIdx.x) * 4; column < columns; column += S::kThreads * 4) {
      const int vector = column / kVector, half = column % kVector / 4;
      const int at = (vector / S::kTeam * 2 + half) * S::kTeam + vector % S::kTeam;
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

// A thread's part of the rows that its team has next: a ring of stages in shared memory, of one row
// of each tensor. `place`: the columns of a thread; where a row has none of those there are zeros,
// which are never copied to and add nothing to any sum.
template <class Element, class S, bool adds>
struct RowRing {
  static constexpr int kTensors = 2 + adds;  // x, dy, and what is added to dx
  static constexpr int kOfTensor = S::kThreads * S::kVectors;  // vectors, of all rows of a stage
  static constexpr int kBytes = kTensors * kOfTensor * int(sizeof(uint4));  // of a stage
  static constexpr int kMostStages = 3;
  static constexpr int kStep = S::kTeam * kVector;  // elements between two vectors of a thread
  static_assert(ColumnSums<S>::kBytes <= kBytes, "sums of columns lie there at the end");

  uint4* const first;
  uint4* const last;
  uint4* now;

  __device__ RowRing(void* shared, int stages)
      : first(static_cast<uint4*>(shared) + threadIdx.x),
        last(first + (stages - 1) * kTensors * kOfTensor),
        now(first) {}

  __device__ __forceinline__ void advance() {
    now = now == last ? first : now + kTensors * kOfTensor;
  }

  __device__ __forceinline__ uint4& at(int tensor, int i) const {
    return now[tensor * kOfTensor + i * S::kThreads];
  }

  // Begins to copy a row into the stage at hand. `at`: its first element here.
  __device__ __forceinline__ void start(const NormGradArguments& in, int64_t at,
                                        const Place<S>& place) const {
    start(0, static_cast<const Element*>(in.x) + at, int(in.columns), place);
    start(1, static_cast<const Element*>(in.dy) + at, int(in.columns), place);
    if constexpr (adds) {
      start(2, static_cast<const Element*>(in.add) + at, int(in.columns), place);
    }
  }

  __device__ __forceinline__ void start(int tensor, const Element* from, int columns,
                                        const Place<S>& place) const {
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      if (place.column(i) < columns) copy_own(&at(tensor, i), from + i * kStep);
    }
  }

  __device__ __forceinline__ void clear_no_columns(int columns, const Place<S>& place) const {
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      if (place.column(i) < columns) continue;
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) at(tensor, i) = make_uint4(0, 0, 0, 0);
    }
  }
};

// Whether products of dy and weight are made again, of what they were made of, and do not stay in
// registers: but for sm_80 and sm_90 the compiler wants more of these than a block leaves to a thread.
inline constexpr bool kProductsAgain = kLeastArchitecture != 800 && kLeastArchitecture != 900;

// Bytes of shared memory that a block has of rows, and of sums for the bias.
template <class Ring, class S>
constexpr int shared_bytes(int stages, bool both) {
  return stages * Ring::kBytes + (both ? ColumnSums<S>::kBytes : 0);
}

// Grid (parts), with a ring of one to three stages. `adds`: whether something is added to dx.
template <class Element, class S, bool centred, bool adds>
static __global__ void __launch_bounds__(S::kThreads, 1)
    grad_kernel(const __grid_constant__ NormGradArguments in, int stages) {
  using Ring = RowRing<Element, S, adds>;
  extern __shared__ uint4 shared[];
  __shared__ float across[2][S::kThreads / kWarp][1 + centred];
  static_assert(sizeof(across) <= kAlwaysShared);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Place<S> place;
  const Sums wanted(in);
  const int columns = int(in.columns);
  const float count = count_of(in.kind, columns);
  const Gamma<Element> gamma(in.weight, in.zero_centered);

  const uint32_t rows = uint32_t(in.rows), step = gridDim.x * S::kRows;
  uint32_t row = blockIdx.x * S::kRows + place.row;
  int64_t at = int64_t(row) * columns + place.column(0);
  // Sums for the bias, where there are such, and behind them the ring.
  float4* const bias_sums = reinterpret_cast<float4*>(shared);
  const bool both = centred && wanted.both();
  uint4* const rows_in_shared = shared + (both ? ColumnSums<S>::kBytes / int(sizeof(uint4)) : 0);
  Ring ring(rows_in_shared, stages);
  for (int stage = 0; stage < stages; ++stage, ring.advance()) {
    ring.clear_no_columns(columns, place);
    if (row + stage * step < rows) ring.start(in, at + int64_t(stage * step) * columns, place);
    end_group_of_copies();
  }
  const ColumnSums<S> of_bias(bias_sums, place);
  Values sums[S::kVectors] = {};  // for the weight, or else for the bias
  if (both) {
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) of_bias.set(i, Values{});
  }

  RowStatistics next(in, row, row < rows, centred);
  for (int turn = 0; row - place.row < rows; turn ^= 1) {
    const Row now(next);
    next = RowStatistics(in, row + step, row + step < rows, centred);
    wait_for_own_copies(stages - 1);
    Values scaled[S::kVectors];
    float means[1 + centred] = {};
    if (row < rows) {
#pragma unroll
      for (int i = 0; i < S::kVectors; ++i) {
        const Values input = unpack<Element>(ring.at(0, i));
        const Values gradient = unpack<Element>(ring.at(1, i));
        const int column = place.column(i);
        const Values weight = gamma(column, column < columns);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const float normed = now.normed(input.of[j]);
          scaled[i].of[j] = gradient.of[j] * weight.of[j];
          means[0] = fmaf(scaled[i].of[j], normed, means[0]);
          if constexpr (centred) means[1] += scaled[i].of[j];
          const bool of_bias_alone = centred && !wanted.weight;
          sums[i].of[j] += of_bias_alone ? gradient.of[j] : gradient.of[j] * normed;
        }
        if (both) of_bias.add(i, gradient);
      }
    }
    add_up<S>(means, across[turn]);
#pragma unroll
    for (int i = 0; i < 1 + centred; ++i) means[i] /= count;
    if (in.dx != nullptr && row < rows) {
      Element* const to = static_cast<Element*>(in.dx) + at;
#pragma unroll
      for (int i = 0; i < S::kVectors; ++i) {
        const Values input = unpack<Element>(ring.at(0, i));
        if constexpr (kProductsAgain) {
          const int column = place.column(i);
          scaled[i] = products(unpack<Element>(ring.at(1, i)), gamma(column, column < columns));
        }
        uint4 dx = input_gradient<Element, centred>(now, means, input, scaled[i]);
        if constexpr (adds) dx = plus<Element>(dx, ring.at(2, i));
        // An assignment is compiled to stores of words here.
        auto* const vector = reinterpret_cast<uint4*>(to + i * Ring::kStep);
        if (place.column(i) < columns) __stwb(vector, dx);
      }
    }
    if (row + stages * step < rows) ring.start(in, at + int64_t(stages * step) * columns, place);
    end_group_of_copies();
    ring.advance();
    row += step;
    at += int64_t(step) * columns;
  }
  if (wanted.count() == 0) return;
  __syncthreads();
  float* const to = in.partials + int64_t(blockIdx.x) * wanted.count() * columns;
  float4* const sums_in_shared = reinterpret_cast<float4*>(rows_in_shared);
  const ColumnSums<S> of_all(sums_in_shared, place);
#pragma unroll
  for (int i = 0; i < S::kVectors; ++i) of_all.set(i, sums[i]);
  __syncthreads();
  ColumnSums<S>::put(sums_in_shared, to, columns);
  if (both) ColumnSums<S>::put(bias_sums, to + columns, columns);
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
  const Row row(RowStatistics(in, blockIdx.x, true, centred));
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
    const Values input = unpack<Element>(load_vector<Element>(in.x, begin + column));
    Values scaled = unpack<Element>(load_vector<Element>(in.dy, begin + column));
    const Values weight = gamma(column);
#pragma unroll
    for (int j = 0; j < kVector; ++j) scaled.of[j] *= weight.of[j];
    uint4 result = input_gradient<Element, centred>(row, means, input, scaled);
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
    const Row row(RowStatistics(in, at, true, in.mean != nullptr));
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
inline constexpr int kAdded = int(ceil_div(kNormParts, kAdders));  // parts of each, at most

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
  float terms[kAdded];  // all are under way at once
#pragma unroll
  for (int i = 0; i < kAdded; ++i) {
    const int part = warp + i * kAdders;
    const bool there = column < all && part < parts;
    terms[i] = there ? in.partials[int64_t(part) * all + column] : 0.0f;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kAdded; ++i) sum += terms[i];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= all) return;
#pragma unroll
  for (int i = 1; i < kAdders; ++i) sum += shared[i][lane];
  const bool of_weight = wanted.weight && column < columns;
  void* const to = of_weight ? in.dweight : in.dbias;
  narrow(sum, static_cast<Element*>(to) + (column < columns ? column : column - columns));
}

// Calls `launch` with the shape of a row. Of long ones few are under way in a block, and twice the
// warps hide what each of them waits for, but for a layer norm, whose sums take the registers.
template <bool centred, class Launch>
Status with_grad_shape(int64_t columns, const Launch& launch) {
  if (columns <= 64) return launch(Shape<512, 8, 1>());
  if (columns <= 256) return launch(Shape<512, 32, 1>());
  if (columns <= 512) return launch(Shape<512, 32, 2>());
  if (columns <= 1024) return launch(Shape<512, 32, 4>());
  if (columns <= 2048) return launch(Shape<512, 64, 4>());
  if (columns <= 4096) return launch(Shape<512, 128, 4>());
  static_assert(Shape<512, 512, 4>::kColumns == kColumnsReadOnce);
  static_assert(Shape<1024, 1024, 2>::kColumns == kColumnsReadOnce);
  if constexpr (centred) {
    return columns <= 8192 ? launch(Shape<512, 256, 4>()) : launch(Shape<512, 512, 4>());
  } else {
    return columns <= 8192 ? launch(Shape<1024, 512, 2>()) : launch(Shape<1024, 1024, 2>());
  }
}

// Bytes of shared memory that a launch may ask for.
inline int memory_of_launch() { return cta_shared_memory() - kAlwaysShared; }

template <class Element, class S, bool centred, bool adds>
Status launch_rows(const NormGradArguments& in, int parts, Stream& stream) {
  using Ring = RowRing<Element, S, adds>;
  static std::atomic<uint64_t> allowed{0};
  const auto kernel = &grad_kernel<Element, S, centred, adds>;
  const bool both = Sums(in).both();
  const int most = memory_of_launch();
  int stages = Ring::kMostStages;
  while (stages > 1 && shared_bytes<Ring, S>(stages, both) > most) --stages;
  const int leave = std::min(shared_bytes<Ring, S>(Ring::kMostStages, centred), most);
  Status status = allow_shared_memory(kernel, leave, allowed);
  if (!status.ok()) return status;
  Grid grid{dim3(unsigned(parts)), S::kThreads};
  grid.shared_bytes = shared_bytes<Ring, S>(stages, both);
  return launch_kernel("cudaLaunchKernelEx(norm_grad)", kernel, grid, stream, in, stages);
}

// Sets `parts` to how many there are.
template <class Element, bool centred>
Status launch_rows(const NormGradArguments& in, int& parts, Stream& stream) {
  return with_grad_shape<centred>(in.columns, [&](auto shape) {
    using S = decltype(shape);
    parts = int(std::min(ceil_div(in.rows, S::kRows), kNormParts));
    return in.add != nullptr && in.dx != nullptr
               ? launch_rows<Element, S, centred, true>(in, parts, stream)
               : launch_rows<Element, S, centred, false>(in, parts, stream);
  });
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

// Whether a block has memory for sums for the bias beside its rows.
template <class Element>
bool bias_sums_fit(const NormGradArguments& in) {
  if (in.columns > kColumnsReadOnce) return true;  // they lie in registers
  bool fit = true;
  (void)with_grad_shape<true>(in.columns, [&](auto shape) {
    using S = decltype(shape);
    const int bytes = in.add != nullptr && in.dx != nullptr
                          ? shared_bytes<RowRing<Element, S, true>, S>(1, true)
                          : shared_bytes<RowRing<Element, S, false>, S>(1, true);
    fit = bytes <= memory_of_launch();
    return Status();
  });
  return fit;
}

}  // namespace norm

template <class Element>
static Status launch_norm_grad(const NormGradArguments& in, Stream& stream) {
  if (norm::Sums(in).both() && !norm::bias_sums_fit<Element>(in)) {
    // In two launches, which read x and dy twice: neither sum depends on the other.
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
    parts = int(std::min(ceil_div(in.rows, norm::kStripRows), norm::kStripParts));
    status = norm::launch_long_rows<Element>(in, parts, stream);
  } else if (in.rows > 0) {
    status = in.kind == NormKind::layer ? norm::launch_rows<Element, true>(in, parts, stream)
                                        : norm::launch_rows<Element, false>(in, parts, stream);
  }
  if (!status.ok() || sums == 0) return status;
  const Grid grid{dim3(unsigned(ceil_div(sums * in.columns, norm::kWarp))),
                  norm::kAdders * norm::kWarp};
  return launch_kernel("cudaLaunchKernelEx(norm_grad, parts)", &norm::add_parts_kernel<Element>,
                       grid, stream, in, parts);
}

}  // namespace fusegen
