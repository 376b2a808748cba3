// Host side of GEMMs of 8-bit codes that lie as tensors do, whose contraction is contiguous or not:
//   fprop: a = x [T, K],  b = weight [E, N, K]
//   dgrad: a = dy [T, N], b = weight [E, N, K]
//   wgrad: a = dy [T, N], b = x [T, K]
// Rows are pitch_a or pitch_b bytes apart. Loads end with a group, so that zeros meet zeros behind its
// last token.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/operands_fp8.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/mainloop/umma.sm100.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

static_assert(kSwizzleBytes == kScaleBlock, "boxes of operands_fp8.sm90.cuh are a swizzle's row wide");

template <Gemm kind>
Status check_code_rows(const GemmArguments& g, int64_t pitch_a, int64_t pitch_b) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const int64_t row_a = kind == Gemm::fprop ? g.k : g.n, row_b = g.k;
  if (pitch_a < row_a || pitch_a % kPitch != 0) {
    return {kInvalid, "pitch_a: a multiple of 16, at least the row"};
  }
  if (pitch_b < row_b || pitch_b % kPitch != 0) {
    return {kInvalid, "pitch_b: a multiple of 16, at least the row"};
  }
  return {};
}

// Rows of codes in groups of run-time size, as `encode_ragged` has them.
inline Status encode_ragged_codes(CUtensorMap* map, const void* base, int64_t columns,
                                  int64_t pitch, int box_rows) {
  constexpr cuuint64_t kUnbounded = (cuuint64_t(1) << 31) - 1;
  const cuuint64_t step = cuuint64_t(pitch);
  return encode_tensor<uint8_t, 4>(
      map, base, {cuuint64_t(columns), cuuint64_t(kRaggedRows), kUnbounded, kUnbounded},
      {step, (cuuint64_t(1) << 34) - step, step},
      {cuuint32_t(kSwizzleBytes), cuuint32_t(box_rows), 1, 1});
}

// `T` are a kernel's traits.
template <Gemm kind, class Result, class T>
Status encode_codes_as_rows(const GemmArguments& g, int64_t pitch_a, int64_t pitch_b,
                            CUtensorMap* a, CUtensorMap* b, CUtensorMap* d) {
  if constexpr (kind == Gemm::wgrad) {
    Status status = encode_ragged_codes(a, g.a, g.n, pitch_a, T::kTileK);
    if (status.ok()) status = encode_ragged_codes(b, g.b, g.k, pitch_b, T::kTileK);
    if (!status.ok()) return status;
    return encode_matrices<Result>(d, g.d, g.groups, g.n, g.k, kChunkRows, kStoreColumns<Result>);
  } else {
    constexpr bool kForward = kind == Gemm::fprop;
    constexpr int kBoxRowsB = kForward ? T::kBoxWidthB : T::kTileK;
    Status status =
        encode_codes(a, g.a, g.tokens, kForward ? g.k : g.n, pitch_a, T::kBoxRowsA);
    if (status.ok()) {
      status = encode_code_matrices(b, g.b, g.groups, g.n, g.k, pitch_b, kBoxRowsB);
    }
    if (!status.ok()) return status;
    return encode_ragged<Result>(d, g.d, kForward ? g.n : g.k, kChunkRows, kStoreColumns<Result>);
  }
}

}  // namespace fusegen
