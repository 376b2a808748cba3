// Host side of GEMMs of FP8 codes by TMA: what their arguments must hold, and descriptors.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/gemm/operands.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

// Rows of codes, `pitch` bytes apart.
inline Status encode_codes(CUtensorMap* map, const void* base, int64_t rows, int64_t columns,
                           int64_t pitch, int box_rows) {
  return encode_tensor<uint8_t, 2>(map, base, {cuuint64_t(columns), cuuint64_t(rows)},
                                   {cuuint64_t(pitch)}, {kScaleBlock, cuuint32_t(box_rows)});
}

inline Status encode_code_matrices(CUtensorMap* map, const void* base, int64_t count, int64_t rows,
                                   int64_t columns, int64_t pitch, int box_rows) {
  return encode_tensor<uint8_t, 3>(
      map, base, {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(count)},
      {cuuint64_t(pitch), cuuint64_t(pitch) * cuuint64_t(rows)},
      {kScaleBlock, cuuint32_t(box_rows), 1});
}

template <Gemm kind, class Result, class T>
Status encode_fp8_operands(const Fp8GemmArguments& in, CUtensorMap* a, CUtensorMap* b,
                           CUtensorMap* d) {
  const GemmArguments& g = in.gemm;
  if constexpr (kind == Gemm::wgrad) {
    const int64_t k = stored_tokens(g);
    Status status = encode_codes(a, g.a, g.n, k, in.pitch_a, T::kBoxRowsA);
    if (status.ok()) status = encode_codes(b, g.b, g.k, k, in.pitch_b, T::kBoxWidthB);
    if (!status.ok()) return status;
    return encode_matrices<Result>(d, g.d, g.groups, g.n, g.k, kChunkRows,
                                   kStoreColumns<Result>);
  } else {
    const int64_t columns = kind == Gemm::fprop ? g.n : g.k;
    const int64_t k = kind == Gemm::fprop ? g.k : g.n;
    Status status = encode_codes(a, g.a, g.tokens, k, in.pitch_a, T::kBoxRowsA);
    if (status.ok()) {
      status =
          encode_code_matrices(b, g.b, g.groups, columns, k, in.pitch_b, T::kBoxWidthB);
    }
    if (!status.ok()) return status;
    return encode_ragged<Result>(d, g.d, columns, kChunkRows, kChunkColumns);
  }
}

template <Gemm kind>
Status check_fp8_arguments(const Fp8GemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const GemmArguments& g = in.gemm;
  if (Status status = check_arguments(g); !status.ok()) return status;
  const int64_t k = kind == Gemm::fprop   ? g.k
                        : kind == Gemm::dgrad ? g.n
                                              : stored_tokens(g);
  if (in.pitch_a < k || in.pitch_a % kPitch != 0) {
    return {kInvalid, "pitch_a: a multiple of 16, at least the contraction"};
  }
  if (in.pitch_b < k || in.pitch_b % kPitch != 0) {
    return {kInvalid, "pitch_b: a multiple of 16, at least the contraction"};
  }
  const bool has_scales = in.scale_a != nullptr && in.scale_b != nullptr;
  if (g.tokens > 0 && !has_scales) return {kInvalid, "scale_a and scale_b"};
  return {};
}

}  // namespace fusegen
