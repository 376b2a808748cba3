// Grouped and dense GEMM for sm_100a with operands whose scales the tensor core reads: the kernel of
// gemm/gemm.sm100.cuh over codes, whose scales come with each stage and go on to tensor memory. Codes
// of 8 bits lie as gemm/operands_codes.sm100.cuh says, those of 4 bits as gemm/gemm_scaled.h does.
#pragma once

#include <cuda_fp8.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "fusegen/common/fp4.h"
#include "fusegen/gemm/arguments_scaled.cuh"
#include "fusegen/gemm/gemm.sm100.cuh"
#include "fusegen/gemm/gemm_scaled.h"
#include "fusegen/gemm/operands_codes.sm100.cuh"
#include "fusegen/gemm/operands_fp8.sm90.cuh"
#include "fusegen/load/scale_atoms.sm90.cuh"
#include "fusegen/visit/group_amaxes.cuh"

namespace fusegen {

template <Gemm kind, class A, class B, class Config, Store store, int bits = UmmaElement<A>::kBits>
struct ScaledTcgen05Traits
    : Tcgen05TileTraits<bits == 4 ? tcgen05::Kind::mxf4nvf4 : tcgen05::Kind::mxf8f6f4, A, B,
                        kMajorOfA<kind, bits>, kMajorOfB<kind, bits>, Config, store,
                        bits == 4 ? 16 : 32> {
  static constexpr Gemm kKind = kind;
  using Walk = Walker<kind, typename Config::Whole>;
  using Source = TileSource<kind, typename Config::Whole>;
  using Coordinates =
      std::conditional_t<bits == 4, ScaledCoordinates<kind, bits>, PlainCoordinates<kind>>;
};

// `agrees` of gemm/config.sm100.cuh, and the same of what scales add.
template <class Stated, class T, class Config>
constexpr bool agrees_scaled() {
  static_assert(agrees<Stated, T, Config>() && agrees_copies<Stated>());
  static_assert(Stated::scale_block == T::kScaleBlock, "scale_block: unit against traits");
  static_assert(Stated::atom_rows == kAtomRows, "atom_rows: unit against scale_atoms.cuh");
  return true;
}

template <Gemm kind, int bits>
Status check_scaled_codes(const ScaledGemmArguments& in) {
  if constexpr (bits == 4) {
    return check_scaled_arguments<kind, bits>(in);
  } else {
    if (Status status = check_arguments(in.gemm); !status.ok()) return status;
    if (in.gemm.tokens > 0 && (in.scale_a == nullptr || in.scale_b == nullptr)) {
      return {static_cast<int>(cudaErrorInvalidValue), "scale_a and scale_b"};
    }
    return check_code_rows<kind>(in.gemm, in.pitch_a, in.pitch_b);
  }
}

// In transposed copies zeros follow the last block of a group, up to the pitch.
template <Gemm kind, class Result, class T>
Status encode_scaled_codes(const ScaledGemmArguments& in, CUtensorMap* a, CUtensorMap* b,
                           CUtensorMap* d) {
  if constexpr (T::kBits == 4) {
    const int64_t bytes = (kind == Gemm::fprop ? in.gemm.k : in.gemm.n) * T::kBits / 8;
    const int64_t bytes_a = kind == Gemm::wgrad ? in.pitch_a : bytes;
    const int64_t bytes_b = kind == Gemm::wgrad ? in.pitch_b : bytes;
    return encode_code_operands<kind, Result, T>(
        in.gemm, {bytes_a, in.pitch_a, bytes_b, in.pitch_b}, a, b, d);
  } else {
    return encode_codes_as_rows<kind, Result, T>(in.gemm, in.pitch_a, in.pitch_b, a, b, d);
  }
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
  const Tcgen05Loader<T, Scales> loader{&map_a, &map_b, Scales{scales}};
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
  if (Status status = check_scaled_codes<kind, T::kBits>(in); !status.ok()) return status;
  using Result = Stored<Element, store>;
  const GemmArguments& gemm = in.gemm;
  if (gemm.tokens == 0) return multiply_nothing<kind, Result, store>(gemm, stream);
  CUtensorMap a, b, d;
  Status status = encode_scaled_codes<kind, Result, T>(in, &a, &b, &d);
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
