// Host side of gemm/gemm.sm90.cuh: descriptors and launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/epilogue.sm90.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm.sm90.cuh"
#include "fusegen/common/status.h"
#include "fusegen/launch/stream.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/sink/stored.cuh"

namespace fusegen {

static_assert(kMostTokens <= kRaggedRows);

// `Element` of the operands, `Result` as it is stored.
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

// Internal linkage, as of the kernel: the static below would otherwise be one object for every
// shared library of the process that was built from this header (STB_GNU_UNIQUE), while each
// library has kernels of its own to configure.
template <Gemm kind, class Element, class Config, Store store = Store::io, class Change = Keep>
static Status launch_gemm(const GemmArguments& in, Stream& stream, const Change& change = {}) {
  using T = Traits<kind, Element, Config, store>;
  if (Status status = check_arguments(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (in.tokens == 0) return multiply_nothing<kind, Result, store>(in, stream);
  CUtensorMap a, b, d;
  Status status = encode_operands<kind, Element, Result, T, Config>(in, &a, &b, &d);
  if (!status.ok()) return status;
  Epilogue<Change, store> epilogue{change};
  status = encode_epilogue<Element>(in.epilogue, columns_of<kind>(in), &epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Bias<Element>,
                    Epilogue<Change, store>>(
      &ragged_gemm<kind, Element, Config, store, Change>, shared_memory_allowed, in, stream, a, b,
      d, bias_of<Element>(in), epilogue);
}

}  // namespace fusegen
