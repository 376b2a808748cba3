// What a GEMM is launched with whose operands have scales that the matrix instruction reads; host
// side, no device code.
//
// Codes are those of gemm/gemm_fp8.h, of 8 bits or of 4, but for where a group's tokens start in
// transposed copies: at 128 * (begin(g) / 128 + g). On sm_100a those of 8 bits lie as
// gemm/operands_codes.sm100.cuh says. Scales are one byte for each 32 elements of 8 bits
// along the contraction, E8M0, or for each 16 of 4 bits, E4M3. They lie in atoms of 128 rows by 4
// blocks, as quantize/scale_atoms.cuh says:
//   fprop: scale_a [T / 128 + E][ceil(K, depth)] atoms, scale_b [E][ceil(N, 128)][ceil(K, depth)]
//   dgrad: scale_a [T / 128 + E][ceil(N, depth)],       scale_b [E][ceil(K, 128)][ceil(N, depth)]
//   wgrad: scale_a [ceil(N, 128)][(T / 128 + E) * 128 / depth], scale_b [ceil(K, 128)][...]
// where `depth` is 4 blocks; without groups T / 128 + E is ceil(T, 128), and tokens have
// ceil(T, depth) atoms. What lies in no block must stand for a finite number.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"

namespace fusegen {

// The result is multiplied by amax_a amax_b / (448 6)^2 of its group, where codes have 4 bits.
struct ScaledGemmArguments {
  GemmArguments gemm;
  int64_t pitch_a;  // bytes, a multiple of 16
  int64_t pitch_b;
  const void* scale_a;
  const void* scale_b;
  const float* amax_a = nullptr;  // [groups]
  const float* amax_b = nullptr;
};

inline GemmSizes gemm_sizes(Gemm kind, const ScaledGemmArguments& in) {
  return gemm_sizes(kind, in.gemm);
}

}  // namespace fusegen
