// Host side of GEMMs of codes by TMA: descriptors of operands and results.
#pragma once

#include <cuda.h>

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

// Bytes of a row of each operand in memory, and from one row to the next.
struct CodeRows {
  int64_t bytes_a, pitch_a;
  int64_t bytes_b, pitch_b;
};

// `T` are a kernel's traits.
template <Gemm kind, class Result, class T>
Status encode_code_operands(const GemmArguments& g, const CodeRows& rows, CUtensorMap* a,
                            CUtensorMap* b, CUtensorMap* d) {
  const int64_t columns = columns_of<kind>(g);
  const int64_t rows_a = kind == Gemm::wgrad ? g.n : g.tokens;
  Status status = encode_codes(a, g.a, rows_a, rows.bytes_a, rows.pitch_a, T::kBoxRowsA);
  if (!status.ok()) return status;
  if constexpr (kind == Gemm::wgrad) {
    status = encode_codes(b, g.b, columns, rows.bytes_b, rows.pitch_b, T::kBoxWidthB);
    if (!status.ok()) return status;
    return encode_matrices<Result>(d, g.d, g.groups, g.n, g.k, kChunkRows, kStoreColumns<Result>);
  } else {
    status = encode_code_matrices(b, g.b, g.groups, columns, rows.bytes_b, rows.pitch_b,
                                  T::kBoxWidthB);
    if (!status.ok()) return status;
    return encode_ragged<Result>(d, g.d, columns, kChunkRows, kStoreColumns<Result>);
  }
}

template <Gemm kind, class Result, class T>
Status encode_fp8_operands(const Fp8GemmArguments& in, CUtensorMap* a, CUtensorMap* b,
                           CUtensorMap* d) {
  const GemmArguments& g = in.gemm;
  const int64_t k = kind == Gemm::wgrad ? stored_tokens(g) : kind == Gemm::fprop ? g.k : g.n;
  return encode_code_operands<kind, Result, T>(g, {k, in.pitch_a, k, in.pitch_b}, a, b, d);
}

}  // namespace fusegen
