// Host side of GEMMs by TMA: descriptors of operands and results.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

static_assert(kMostTokens <= kRaggedRows);

// Weights of `groups`, whose rows are two halves, each clipped by itself; boxes of `box_rows` of one.
template <class Element>
Status encode_halves(CUtensorMap* map, const void* base, int64_t groups, int64_t rows, int64_t k,
                     int box_rows, int box_k) {
  if (rows % (2 * kRowAlignment) != 0) {
    return {static_cast<int>(cudaErrorInvalidValue), "gated n: a multiple of 16"};
  }
  const cuuint64_t pitch = k * sizeof(Element), half = cuuint64_t(rows) / 2;
  return encode_tensor<Element, 4>(map, base, {cuuint64_t(k), half, 2, cuuint64_t(groups)},
                                   {pitch, half * pitch, 2 * half * pitch},
                                   {cuuint32_t(box_k), cuuint32_t(box_rows), 1, 1});
}

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
    if (!status.ok()) return status;
    if constexpr (is_gated(T::kStore)) {
      status = encode_halves<Element>(b, in.b, in.groups, in.n, in.k, kBoxRowsB, kTileK);
      if (!status.ok()) return status;
      constexpr int kColumns = kGatedColumns<T::kTileN>;
      return encode_ragged_part<Result>(d, in.d, in.n / 2, in.n / 2, kChunkRows, kColumns,
                                        kGatedSwizzle<T::kTileN>);
    } else {
      status = encode_matrices<Element>(b, in.b, in.groups, in.n, in.k, kBoxRowsB, kBoxColumnsB);
      if (!status.ok()) return status;
      return encode_ragged<Result>(d, in.d, kForward ? in.n : in.k, kChunkRows,
                                   kStoreColumns<Result>);
    }
  }
}

}  // namespace fusegen
