// TMA descriptors: plain tensors, and tensors whose rows fall into groups of run-time size.
//
// A ragged descriptor reads or writes any group of rows [begin, begin + length) of a row-major
// matrix through one encoding, made before the group sizes are known. A box that crosses the end
// of its group is clipped by the hardware: loads give zeros, stores are dropped. The trick is the
// wrap-around of 64-bit addresses. The matrix is encoded with rank 4, innermost first:
//   dimensions {columns, 2^30, 2^31 - 1, 2^31 - 1}, byte strides {s, 2^34 - s, s}
// and row r of a group is addressed as {column, 2^30 - length + r, 2^30, begin + length}:
//   (2^30 - length + r) s + 2^30 (2^34 - s) + (begin + length) s = (begin + r) s + 2^64.
// The second coordinate meets its bound exactly at r = length. Rows must be 16-byte aligned.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/status.h"

namespace fusegen {

inline constexpr int kRaggedRows = 1 << 30;  // most rows that a ragged matrix may have

template <class Element>
struct ElementType;
template <>
struct ElementType<__nv_bfloat16> {
  static constexpr CUtensorMapDataType tensor_map = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};
template <>
struct ElementType<__half> {
  static constexpr CUtensorMapDataType tensor_map = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};

template <>
struct ElementType<float> {
  static constexpr CUtensorMapDataType tensor_map = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
};
template <>
struct ElementType<uint8_t> {  // FP8 codes
  static constexpr CUtensorMapDataType tensor_map = CU_TENSOR_MAP_DATA_TYPE_UINT8;
};

// Coordinates of a box, innermost first; a descriptor of rank r reads the first r.
struct BoxCoordinates {
  int32_t x, y, z, w;
};

__host__ __device__ constexpr BoxCoordinates ragged_coordinates(int32_t column, int32_t begin,
                                                                int32_t length, int32_t row) {
  return {column, kRaggedRows - length + row, kRaggedRows, begin + length};
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, looked up at run time so that the library needs no link to libcuda.
inline Status find_encoder(EncodeTiled* encoder) {
  struct Lookup {
    void* function = nullptr;
    cudaError_t error;
    Lookup() {
      cudaDriverEntryPointQueryResult found;
      error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                               cudaEnableDefault, &found);
      if (error == cudaSuccess && found != cudaDriverEntryPointSuccess) {
        error = cudaErrorSymbolNotFound;
      }
    }
  };
  static const Lookup lookup;
  *encoder = reinterpret_cast<EncodeTiled>(lookup.function);
  return {lookup.error, "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)"};
}

template <class Element, int Rank>
Status encode_tensor(CUtensorMap* map, const void* base, const cuuint64_t (&sizes)[Rank],
                     const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank],
                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  EncodeTiled encode;
  if (Status status = find_encoder(&encode); !status.ok()) return status;
  cuuint32_t steps[Rank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result = encode(
      map, ElementType<Element>::tensor_map, Rank, const_cast<void*>(base), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return {static_cast<int>(result), "cuTensorMapEncodeTiled"};
}

// [rows, columns], row-major.
template <class Element>
Status encode_matrix(CUtensorMap* map, const void* base, int64_t rows, int64_t columns,
                     int box_rows, int box_columns) {
  const cuuint64_t pitch = columns * sizeof(Element);
  return encode_tensor<Element, 2>(map, base, {cuuint64_t(columns), cuuint64_t(rows)}, {pitch},
                                   {cuuint32_t(box_columns), cuuint32_t(box_rows)});
}

// [count, rows, columns], row-major: one matrix per group.
template <class Element>
Status encode_matrices(CUtensorMap* map, const void* base, int64_t count, int64_t rows,
                       int64_t columns, int box_rows, int box_columns) {
  const cuuint64_t pitch = columns * sizeof(Element);
  return encode_tensor<Element, 3>(
      map, base, {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(count)},
      {pitch, pitch * cuuint64_t(rows)}, {cuuint32_t(box_columns), cuuint32_t(box_rows), 1});
}

// The first columns of rows in groups of run-time size, which have `row` columns; coordinates come
// from `ragged_coordinates`.
template <class Element>
Status encode_ragged_part(CUtensorMap* map, const void* base, int64_t columns, int64_t row,
                          int box_rows, int box_columns,
                          CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  constexpr cuuint64_t kUnbounded = (cuuint64_t(1) << 31) - 1;
  const cuuint64_t pitch = row * sizeof(Element);
  return encode_tensor<Element, 4>(
      map, base, {cuuint64_t(columns), cuuint64_t(kRaggedRows), kUnbounded, kUnbounded},
      {pitch, (cuuint64_t(1) << 34) - pitch, pitch},
      {cuuint32_t(box_columns), cuuint32_t(box_rows), 1, 1}, swizzle);
}

// All columns.
template <class Element>
Status encode_ragged(CUtensorMap* map, const void* base, int64_t columns, int box_rows,
                     int box_columns) {
  return encode_ragged_part<Element>(map, base, columns, columns, box_rows, box_columns);
}

}  // namespace fusegen
