// Host side of GEMMs by TMA: descriptors of operands and results.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

static_assert(kMostTokens <= kRaggedRows);

// `Element` of the operands, `Result` as it is stored; `T` are a kernel's traits.
template <Gemm kind, class Element, class Result, class T>
Status encode_operands(const GemmArguments& in, CUtensorMap* a, CUtensorMap* b, CUtensorMap* d) {
  constexpr int kTileK = T::kTileK;
  if constexpr (kind == Gemm::wgrad) {
    // Without tokens nothing is read, but a descriptor refuses the null address of an empty tensor.
    const void* const dy = in.tokens > 0 ? in.a : in.d;
    const void* const x = in.tokens > 0 ? in.b : in.d;
    Status status = encode_ragged<Element>(a, dy, in.n, kTileK, T::kBoxRowsA);
    if (status.ok()) status = encode_ragged<Element>(b, x, in.k, kTileK, T::kBoxWidthB);
    if (!status.ok()) return status;
    return encode_matrices<Result>(d, in.d, in.groups, in.n, in.k, kChunkRows,
                                   kStoreColumns<Result>);
  } else {
    constexpr bool kForward = kind == Gemm::fprop;
    constexpr int kBoxRowsB = kForward ? T::kBoxWidthB : kTileK;
    constexpr int kBoxColumnsB = kForward ? kTileK : T::kBoxWidthB;
    Status status = encode_matrix<Element>(a, in.a, in.tokens, kForward ? in.k : in.n,
                                           T::kBoxRowsA, kTileK);
    if (status.ok()) {
      status = encode_matrices<Element>(b, in.b, in.groups, in.n, in.k, kBoxRowsB, kBoxColumnsB);
    }
    if (!status.ok()) return status;
    return encode_ragged<Result>(d, in.d, kForward ? in.n : in.k, kChunkRows, kChunkColumns);
  }
}

}  // namespace fusegen
