// Host side of gemm/gemm.sm90.cuh: descriptors, grid and launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/launch/launch.cuh"
#include "fusegen/common/status.h"
#include "fusegen/launch/shared_memory.cuh"
#include "fusegen/launch/stream.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/stored.cuh"

namespace fusegen {

// `Element` of the operands, `Result` of the product.
template <Gemm kind, class Element, class Result, class T, class Config>
Status encode_operands(const GemmArguments& in, CUtensorMap* a, CUtensorMap* b, CUtensorMap* d) {
  constexpr int kTileK = Config::tile_k;
  if constexpr (kind == Gemm::wgrad) {
    // Without tokens nothing is read, but a descriptor refuses the null address of an empty tensor.
    const void* const dy = in.tokens > 0 ? in.a : in.d;
    const void* const x = in.tokens > 0 ? in.b : in.d;
    Status status = encode_ragged<Element>(a, dy, in.n, kTileK, 64);
    if (status.ok()) status = encode_ragged<Element>(b, x, in.k, kTileK, 64);
    if (!status.ok()) return status;
    return encode_matrices<Result>(d, in.d, in.groups, in.n, in.k, kChunkRows,
                                   kStoreColumns<Result>);
  } else {
    constexpr bool kForward = kind == Gemm::fprop;
    constexpr int kBoxRowsB = kForward ? T::kBoxWidthB : kTileK;
    constexpr int kBoxColumnsB = kForward ? kTileK : T::kBoxWidthB;
    Status status =
        encode_matrix<Element>(a, in.a, in.tokens, kForward ? in.k : in.n, 64, kTileK);
    if (status.ok()) {
      status = encode_matrices<Element>(b, in.b, in.groups, in.n, in.k, kBoxRowsB, kBoxColumnsB);
    }
    if (!status.ok()) return status;
    return encode_ragged<Result>(d, in.d, kForward ? in.n : in.k, kChunkRows, kChunkColumns);
  }
}

// CTAs that can have work: never more than tiles exist, whatever the group sizes are.
template <Gemm kind, class Config>
int64_t most_steps(const GemmArguments& in) {
  const auto ceil_div = [](int64_t extent, int64_t size) { return (extent + size - 1) / size; };
  const int64_t columns = ceil_div(kind == Gemm::fprop ? in.n : in.k, Config::tile_n);
  if (kind == Gemm::wgrad) {
    return in.groups * ceil_div(ceil_div(in.n, Config::tile_m), Config::cluster) * columns;
  }
  const int64_t parts = in.group_sizes == nullptr ? 1 : in.groups + 1;
  const int64_t whole = in.tokens / (Config::tile_m * Config::cluster);
  const int64_t begun = in.tokens < parts ? in.tokens : parts;  // groups that can be partly filled
  return (whole + begun) * columns;
}

inline Status check_arguments(const GemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.tokens < 0 || in.tokens > kRaggedRows) return {kInvalid, "0 <= tokens <= 2^30"};
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

// Grid and launch of a kernel of `run_cta`'s kind. `parameters` come before its shape.
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
  const int clusters = in.sm_count / Config::cluster;
  if (clusters < 1) return {static_cast<int>(cudaErrorInvalidValue), "sm_count >= cluster size"};
  const unsigned ctas = unsigned((steps < clusters ? steps : clusters) * Config::cluster);
  const Grid grid{dim3(ctas), T::kThreads, T::kUsedBytes, Config::cluster};
  const Shape shape{in.group_sizes, int32_t(in.tokens), int32_t(in.groups), int32_t(in.n),
                    int32_t(in.k)};
  return launch_kernel("cudaLaunchKernelEx(gemm)", kernel, grid, stream, parameters..., shape);
}

// A product of no tokens: its operands have no memory that a descriptor could describe, and only
// wgrad has results.
template <Gemm kind, class Result, Store store>
Status multiply_nothing(const GemmArguments& in, Stream& stream) {
  static_assert(store == Store::io ||
                    kind == (store == Store::scaled_bias ? Gemm::fprop : Gemm::wgrad),
                "gradients of weights alone go elsewhere, and fprop alone has a bias");
  if (kind != Gemm::wgrad || adds(store)) return {};
  const size_t bytes = size_t(in.groups) * size_t(in.n) * size_t(in.k) * sizeof(Result);
  return clear_memory(in.d, bytes, stream);
}

// Internal linkage, as of the kernel: the static below would otherwise be one object for every
// shared library of the process that was built from this header (STB_GNU_UNIQUE), while each
// library has kernels of its own to configure.
template <Gemm kind, class Element, class Config, Store store = Store::io>
static Status launch_gemm(const GemmArguments& in, Stream& stream) {
  using T = Traits<kind, Element, Config, store>;
  if (Status status = check_arguments(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (in.tokens == 0) return multiply_nothing<kind, Result, store>(in, stream);
  CUtensorMap a, b, d;
  Status status = encode_operands<kind, Element, Result, T, Config>(in, &a, &b, &d);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Bias<Element>>(
      &ragged_gemm<kind, Element, Config, store>, shared_memory_allowed, in, stream, a, b, d,
      bias_of<Element>(in));
}

}  // namespace fusegen
