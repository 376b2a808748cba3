// Host side of every GEMM: what its arguments must hold, and how many CTAs are launched for them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fusegen/common/ceil_div.h"
#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/launch/shared_memory.cuh"
#include "fusegen/launch/stream.h"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/visit/bias.cuh"

namespace fusegen {

inline constexpr int64_t kMostTokens = int64_t(1) << 30;  // sums of group sizes stay in 32 bits

inline Status check_arguments(const GemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.tokens < 0 || in.tokens > kMostTokens) return {kInvalid, "0 <= tokens <= 2^30"};
  if (in.groups < 1 || in.groups > 65535) return {kInvalid, "1 <= groups <= 65535"};
  if (in.group_sizes == nullptr && in.groups != 1) return {kInvalid, "dense: groups = 1"};
  const auto fits = [](int64_t row) {
    return row >= kRowAlignment && row % kRowAlignment == 0 && row < 1 << 30;
  };
  if (!fits(in.n)) return {kInvalid, "n: a multiple of 8"};
  if (!fits(in.k)) return {kInvalid, "k: a multiple of 8"};
  return {};
}

template <class Element>
Bias<Element> bias_of(const GemmArguments& in) {
  return {static_cast<const Element*>(in.bias), in.row_scales};
}

// Of a result.
template <Gemm kind>
int64_t columns_of(const GemmArguments& in) {
  return kind == Gemm::fprop ? in.n : in.k;
}

// CTAs that can have work: never more than tiles exist, whatever the group sizes are.
template <Gemm kind, class Config>
int64_t most_steps(const GemmArguments& in) {
  const int64_t columns = ceil_div(columns_of<kind>(in), Config::tile_n);
  if (kind == Gemm::wgrad) {
    return in.groups * ceil_div(ceil_div(in.n, Config::tile_m), Config::cluster) * columns;
  }
  const int64_t parts = in.group_sizes == nullptr ? 1 : in.groups + 1;
  const int64_t whole = in.tokens / (Config::tile_m * Config::cluster);
  const int64_t begun = in.tokens < parts ? in.tokens : parts;  // groups that can be partly filled
  return (whole + begun) * columns;
}

// Grid and launch of a persistent kernel, as many CTAs as the SMs hold. `parameters` come before
// its shape.
template <Gemm kind, class T, class Config, class... Parameters>
Status launch_cta(void (*kernel)(Parameters..., Shape), std::atomic<uint64_t>& allowed,
                  const GemmArguments& in, Stream& stream,
                  const std::common_type_t<Parameters>&... parameters) {
  constexpr int64_t kMostSteps = (int64_t(1) << 31) - 1;
  const int64_t steps = most_steps<kind, Config>(in);
  if (steps > kMostSteps) {
    return {static_cast<int>(cudaErrorInvalidValue), "tiles: fewer than 2^31"};
  }
  if (Status status = allow_shared_memory(kernel, T::kUsedBytes, allowed); !status.ok()) {
    return status;
  }
  const int64_t clusters = int64_t(in.sm_count) * T::kCtas / Config::cluster;
  if (clusters < 1) return {static_cast<int>(cudaErrorInvalidValue), "sm_count >= cluster size"};
  const unsigned ctas = unsigned((steps < clusters ? steps : clusters) * Config::cluster);
  const Grid grid{dim3(ctas), T::kThreads, T::kUsedBytes, Config::cluster};
  const Shape shape{in.group_sizes, int32_t(in.tokens), int32_t(in.groups), int32_t(in.n),
                    int32_t(in.k), int32_t(in.groups + in.clears)};
  return launch_kernel("cudaLaunchKernelEx(gemm)", kernel, grid, stream, parameters..., shape);
}

// A GEMM of no tokens: its operands have no memory that could be read, and only wgrad has
// results.
template <Gemm kind, class Result, Store store>
Status multiply_nothing(const GemmArguments& in, Stream& stream) {
  constexpr bool kForward = store == Store::scaled_bias, kRows = changes(store);
  static_assert(store == Store::io || store == Store::fp32 ||
                    (kForward ? kind == Gemm::fprop : kRows == (kind != Gemm::wgrad)),
                "gradients of weights alone are added to something, and fprop alone has a bias");
  if (kind != Gemm::wgrad || adds(store)) return {};
  const size_t bytes = size_t(in.groups) * size_t(in.n) * size_t(in.k) * sizeof(Result);
  return clear_memory(in.d, bytes, stream);
}

}  // namespace fusegen
