// FP8 GEMMs for sm_90a whose epilogue is a gated activation and its quantisation by delayed scaling:
// the kernel of gemm/gemm_fp8.sm90.cuh with a sink of its own.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "fusegen/common/status.h"
#include "fusegen/gemm/gated_codes.h"
#include "fusegen/gemm/launch_fp8.sm90.cuh"
#include "fusegen/sink/gated_codes.sm90.cuh"

namespace fusegen {

template <class Gated, class Format>
struct Epilogue<GatedCodes<Gated, Format>, Store::gated_aux>
    : GatedCodesEpilogue<GatedCodes<Gated, Format>> {};

template <class T, class Result, class Values, class Gated, class Format>
struct ResultSinkOf<T, Result, Values, GatedCodes<Gated, Format>> {
  static_assert(T::kStore == Store::gated_aux);
  using Told = Epilogue<GatedCodes<Gated, Format>, Store::gated_aux>;
  static constexpr int kTileRows = T::kBoxesA * T::kBoxRowsA;
  using Sink = GatedCodesStore<Result, Values, kTileRows, T::kBuffers, Told>;

  template <class Cta>
  __device__ static Sink make(const Cta& cta, const CUtensorMap*, const Told& told, int32_t columns,
                              int32_t, uint32_t index) {
    const ChunkRing<T::kBuffers> ring(cta.buffers() + index * T::kBuffers * kChunkBytes);
    return {told, {nullptr, ring, cta.lane, {}}, columns / 2};
  }
};

template <class A, class B, Accumulation accumulation, class Config>
using GatedCodesTraits =
    Fp8Traits<Gemm::fprop, A, B, Fp8Scaling::tensor, accumulation, Config, Store::gated_aux>;

namespace gated_codes {

// Weights of `groups`, whose rows are two halves, each clipped by itself.
inline Status encode_weights(CUtensorMap* map, const Fp8GemmArguments& in, int box_rows) {
  const GemmArguments& gemm = in.gemm;
  if (gemm.n % (2 * kRowAlignment) != 0) {
    return {static_cast<int>(cudaErrorInvalidValue), "gated n: a multiple of 16"};
  }
  const cuuint64_t pitch = in.pitch_b, half = cuuint64_t(gemm.n) / 2;
  return encode_tensor<uint8_t, 4>(map, gemm.b, {cuuint64_t(gemm.k), half, 2, cuuint64_t(gemm.groups)},
                                   {pitch, half * pitch, 2 * half * pitch},
                                   {kScaleBlock, cuuint32_t(box_rows), 1, 1});
}

// One group alone ends with the pitch, a multiple of 16.
inline ColumnwiseCodes columnwise_codes(const GatedCodesArguments& in) {
  const QuantizedCopy& copy = in.step.quantize.columnwise;
  const GemmArguments& gemm = in.product.gemm;
  const int64_t align = gemm.group_sizes == nullptr ? kChunkRows : in.step.quantize.row_align;
  return {static_cast<uint8_t*>(copy.data), static_cast<float*>(copy.scale), copy.pitch,
          int32_t(align), gemm.group_sizes, int32_t(gemm.groups), int32_t(gemm.tokens)};
}

// Of no tokens: the columnwise copy has a block for each group all the same.
inline Status encode_nothing(const QuantizeArguments& in, Stream& stream) {
  const size_t scales = size_t(in.groups) * sizeof(float);
  Status status = clear_memory(in.rowwise.scale, scales, stream);
  if (!status.ok() || in.columnwise.data == nullptr) return status;
  status = clear_memory(in.columnwise.scale, scales, stream);
  if (!status.ok()) return status;
  return clear_memory(in.columnwise.data, size_t(in.columns) * size_t(in.columnwise.pitch), stream);
}

template <class Element, int TileN, class Change>
Status encode(const GatedCodesArguments& in, Epilogue<Change, Store::gated_aux>* out) {
  const GemmArguments& gemm = in.product.gemm;
  const QuantizedCopy& codes = in.step.quantize.rowwise;
  out->row_values = static_cast<const float*>(gemm.epilogue.other);
  out->scales = in.step.state.scale;
  out->inverses = static_cast<float*>(codes.scale);
  out->amaxes = in.step.update ? in.step.state.history : nullptr;
  out->groups = int32_t(gemm.groups);
  out->columnwise = columnwise_codes(in);
  out->asked = gemm.epilogue.aux != nullptr;
  Status status = encode_ragged_part<uint8_t>(&out->codes, codes.data, gemm.n / 2, codes.pitch,
                                              kChunkRows, kGatedColumns<TileN>,
                                              CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!status.ok() || !out->asked) return status;
  const auto* const first = static_cast<const Element*>(gemm.epilogue.aux);
  status = encode_half<Element, TileN>(&out->aux[0], first, gemm.n);
  if (!status.ok()) return status;
  return encode_half<Element, TileN>(&out->aux[1], first + gemm.n / 2, gemm.n);
}

}  // namespace gated_codes

// The state of scales moves on behind it: see quantize/state.cuh.
// Internal linkage: see launch_gemm.
template <class A, class B, class Element, Accumulation accumulation, class Config, class Change>
static Status launch_gated_codes(const GatedCodesArguments& in, Stream& stream,
                                 const Change& change) {
  constexpr Gemm kKind = Gemm::fprop;
  constexpr Store kStore = Store::gated_aux;
  constexpr Fp8Scaling kScaling = Fp8Scaling::tensor;
  using T = GatedCodesTraits<A, B, accumulation, Config>;
  const GemmArguments& gemm = in.product.gemm;
  if (Status status = check_fp8_arguments<kKind>(in.product); !status.ok()) return status;
  if (in.step.due == nullptr) {
    return {static_cast<int>(cudaErrorInvalidValue), "gated codes: by a history"};
  }
  if (in.step.quantize.row_align % kChunkRows != 0) {
    return {static_cast<int>(cudaErrorInvalidValue), "gated codes: groups at multiples of 16 rows"};
  }
  if (gemm.tokens == 0) return gated_codes::encode_nothing(in.step.quantize, stream);
  CUtensorMap a, b;
  Scales<kKind, kScaling> scales;
  Epilogue<Change, kStore> epilogue{{change}};
  Status status = encode_codes(&a, gemm.a, gemm.tokens, gemm.k, in.product.pitch_a, T::kBoxRowsA);
  if (status.ok()) status = gated_codes::encode_weights(&b, in.product, T::kBoxWidthB);
  if (status.ok()) status = make_scales<kKind, kScaling, Config>(in.product, &scales);
  if (status.ok()) status = gated_codes::encode<Element, T::kTileN>(in, &epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kKind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap,
                    Scales<kKind, kScaling>, Bias<Element>, Epilogue<Change, kStore>>(
      &ragged_fp8_gemm<kKind, A, B, Element, kScaling, accumulation, Config, kStore, Change>,
      shared_memory_allowed, gemm, stream, a, b, b, scales, bias_of<Element>(gemm), epilogue);
}

}  // namespace fusegen
