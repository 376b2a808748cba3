// Grouped and dense GEMM for sm_100a with operands whose scales the tensor core reads: the kernel of
// gemm/gemm.sm100.cuh over codes, whose scales come with each stage and go on to tensor memory.
#pragma once

#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <atomic>
#include <cstdint>

#include "fusegen/gemm/arguments_scaled.cuh"
#include "fusegen/gemm/gemm.sm100.cuh"
#include "fusegen/gemm/gemm_scaled.h"
#include "fusegen/gemm/operands_fp8.sm90.cuh"
#include "fusegen/load/scale_atoms.sm90.cuh"
#include "fusegen/visit/group_amaxes.cuh"

namespace fusegen {

template <Gemm kind, class A, class B, class Config, Store store>
struct ScaledTcgen05Traits
    : Tcgen05TileTraits<UmmaElement<A>::kBits == 4 ? tcgen05::Kind::mxf4nvf4 : tcgen05::Kind::mxf8f6f4,
                        A, B, StageMajor::K, StageMajor::K, Config, store,
                        UmmaElement<A>::kBits == 4 ? 16 : 32> {
  static constexpr Gemm kKind = kind;
  using Walk = Walker<kind, Config>;
  using Source = TileSource<kind, Config>;
  using Coordinates = ScaledCoordinates<kind, UmmaElement<A>::kBits>;
};

// `agrees` of gemm/config.sm100.cuh, and the same of what scales add.
template <class Stated, class T, class Config>
constexpr bool agrees_scaled() {
  static_assert(agrees<Stated, T, Config>() && agrees_copies<Stated>());
  static_assert(Stated::scale_block == T::kScaleBlock, "scale_block: unit against traits");
  static_assert(Stated::atom_rows == kAtomRows, "atom_rows: unit against scale_atoms.cuh");
  return true;
}

// In transposed copies zeros follow the last block of a group, up to the pitch.
template <Gemm kind, int bits>
CodeRows code_rows(const ScaledGemmArguments& in) {
  if (kind == Gemm::wgrad) return {in.pitch_a, in.pitch_a, in.pitch_b, in.pitch_b};
  const int64_t bytes = (kind == Gemm::fprop ? in.gemm.k : in.gemm.n) * bits / 8;
  return {bytes, in.pitch_a, bytes, in.pitch_b};
}

// Internal linkage keeps the kernels of several shared libraries in one process apart.
template <Gemm kind, class A, class B, class Element, class Config, Store store, class Change>
static __global__ void __launch_bounds__(
    ScaledTcgen05Traits<kind, A, B, Config, store>::kThreads, 1)
    ragged_scaled_tcgen05_gemm(const __grid_constant__ CUtensorMap map_a,
                               const __grid_constant__ CUtensorMap map_b,
                               const __grid_constant__ CUtensorMap map_d, const AtomScales scales,
                               const GroupAmaxes amaxes, const Bias<Element> bias,
                               const __grid_constant__ Epilogue<Change, store> epilogue,
                               const __grid_constant__ Shape shape) {
  using T = ScaledTcgen05Traits<kind, A, B, Config, store>;
  using Scales = AtomLoader<kind, T>;
  const TmaLoader<T, typename T::Coordinates, Scales> loader{&map_a, &map_b, Scales{scales}};
  if constexpr (T::kBits == 4) {
    run_tcgen05_cta<T, Stored<Element, store>>(
        loader, gemm_visitors<kind, store>(bias, shape, amaxes), &map_d, epilogue, shape);
  } else {
    run_tcgen05_cta<T, Stored<Element, store>>(loader, gemm_visitors<kind, store>(bias, shape),
                                               &map_d, epilogue, shape);
  }
}

// Internal linkage: see launch_gemm.
template <Gemm kind, class A, class B, class Element, class Config, Store store = Store::io,
          class Change = Keep>
static Status launch_scaled_tcgen05_gemm(const ScaledGemmArguments& in, Stream& stream,
                                         const Change& change = {}) {
  using T = ScaledTcgen05Traits<kind, A, B, Config, store>;
  if (Status status = check_scaled_arguments<kind, T::kBits>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  const GemmArguments& gemm = in.gemm;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  CUtensorMap a, b, d;
  Status status =
      encode_code_operands<kind, Result, T>(gemm, code_rows<kind, T::kBits>(in), &a, &b, &d);
  if (!status.ok()) return status;
  Epilogue<Change, store> epilogue{change};
  status = encode_epilogue<Element>(gemm.epilogue, columns_of<kind>(gemm), &epilogue);
  if (!status.ok()) return status;
  const AtomCounts counts = atom_counts<kind, T::kScaleBlock>(gemm);
  const AtomScales scales{static_cast<const uint8_t*>(in.scale_a),
                          static_cast<const uint8_t*>(in.scale_b), counts.along, counts.rows_b};
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_cta<kind, T, Config, CUtensorMap, CUtensorMap, CUtensorMap, AtomScales,
                    GroupAmaxes, Bias<Element>, Epilogue<Change, store>>(
      &ragged_scaled_tcgen05_gemm<kind, A, B, Element, Config, store, Change>,
      shared_memory_allowed, gemm, stream, a, b, d, scales, GroupAmaxes{in.amax_a, in.amax_b},
      bias_of<Element>(gemm), epilogue);
}

}  // namespace fusegen
