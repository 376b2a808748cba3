// Host side of gemm/gemm_fp8.sm90.cuh: scales and launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments_fp8.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/gemm/gemm_fp8.sm90.cuh"
#include "fusegen/gemm/operands_fp8.sm90.cuh"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/common/status.h"
#include "fusegen/launch/stream.h"

namespace fusegen {

// Block scales: one box is `width` scales of one block along the contraction.
inline Status encode_scales(CUtensorMap* map, const float* base, int64_t block_count,
                            int64_t columns, int width) {
  return encode_tensor<float, 2>(map, base, {cuuint64_t(columns), cuuint64_t(block_count)},
                                 {cuuint64_t(columns) * sizeof(float)}, {cuuint32_t(width), 1},
                                 CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <Gemm kind, Fp8Scaling scaling, class Config>
Status make_scales(const Fp8GemmArguments& in, Scales<kind, scaling>* out) {
  const GemmArguments& g = in.gemm;
  if constexpr (scaling != Fp8Scaling::block) {
    set_scales<kind>(in, out);
  } else if constexpr (kind == Gemm::wgrad) {
    const int64_t count = stored_scale_blocks(g);
    Status status = encode_scales(&out->a, in.scale_a, count, g.n, Config::tile_m);
    if (!status.ok()) return status;
    return encode_scales(&out->b, in.scale_b, count, g.k, Config::tile_n);
  } else {
    const int64_t k = kind == Gemm::fprop ? g.k : g.n;
    out->weights = in.scale_b;
    out->row_blocks = int32_t(blocks(g.n, kScaleBlock));
    out->column_blocks = int32_t(blocks(g.k, kScaleBlock));
    return encode_scales(&out->a, in.scale_a, blocks(k, kScaleBlock),
                         padded_tokens(g.tokens, g.groups), Config::tile_m);
  }
  return {};
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class A, class B, class Element, Fp8Scaling scaling, Accumulation accumulation,
          class Config, Store store = Store::io, class Change = Keep>
static Status launch_fp8_gemm(const Fp8GemmArguments& in, Stream& stream,
                              const Change& change = {}) {
  using T = Fp8Traits<kind, A, B, scaling, accumulation, Config, store>;
  if (Status status = check_fp8_arguments<kind>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  if (in.gemm.tokens == 0) return multiply_nothing<kind, Result, store>(in.gemm, stream);
  CUtensorMap a, b, d;
  Scales<kind, scaling> scales;
  if (Status status = encode_fp8_operands<kind, Result, T>(in, &a, &b, &d); !status.ok()) {
    return status;
  }
  if (Status status = make_scales<kind, scaling, Config>(in, &scales); !status.ok()) return status;
  Epilogue<Change, store> epilogue{change};
  if (Status status =
          encode_epilogue<Element, T::kTileN>(in.gemm.epilogue, columns_of<kind>(in.gemm), &epilogue);
      !status.ok()) {
    return status;
  }
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, Scales<kind, scaling>,
                    Bias<Element>, Epilogue<Change, store>>(
      &ragged_fp8_gemm<kind, A, B, Element, scaling, accumulation, Config, store, Change>,
      shared_memory_allowed, in.gemm, stream, a, b, d, scales, bias_of<Element>(in.gemm),
      epilogue);
}

}  // namespace fusegen
