// What an FP8 GEMM is launched with; host side, no device code.
//
// FP8 operands have their contraction contiguous, so GEMMs along tokens (wgrad) read transposed
// copies; on sm_100a they lie as gemm/operands_codes.sm100.cuh says. In those copies, and in scales per token and block, group g starts at
//   padded(g) = 32 * (begin(g) / 32 + g),  within  32 * (T / 32 + E)  tokens in all,
// where begin(g) is its first token: computed in O(1), disjoint, aligned for TMA, and a multiple of
// the contraction of one MMA. All divisions round down; ceil(a, b) rounds up.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"

namespace fusegen {

inline constexpr int kTokenAlignment = 32;  // of a group in the padded token space
inline constexpr int kScaleBlock = 128;     // of `Fp8Scaling::block`, in both directions

enum class Fp8Scaling {
  tensor,  // one scale per group or per operand
  row,     // one scale per row of A and per row of B, along the contraction constant
  block,   // 1 x 128 blocks along the contraction; weights 128 x 128
};

enum class Accumulation {
  fast,   // one running MMA accumulator (about 14 bits)
  split,  // sums of at most 128 products are added up in fp32 registers
};

// Tokens of the padded space; the pitch of transposed codes and the width of per-token scales.
constexpr int64_t padded_tokens(int64_t tokens, int64_t groups) {
  return kTokenAlignment * (tokens / kTokenAlignment + groups);
}

// Length of a row of transposed codes: without groups the tokens themselves.
inline int64_t stored_tokens(const GemmArguments& in) {
  return in.group_sizes != nullptr ? padded_tokens(in.tokens, in.groups) : in.tokens;
}

// Rows of scales whose blocks run along tokens.
constexpr int64_t token_scale_blocks(int64_t tokens, int64_t groups) {
  return tokens / kScaleBlock + groups;
}

inline int64_t stored_scale_blocks(const GemmArguments& in) {
  return in.group_sizes != nullptr ? token_scale_blocks(in.tokens, in.groups)
                                   : (in.tokens + kScaleBlock - 1) / kScaleBlock;
}

// Codes of one byte, e4m3 or e5m2, row-major; rows are pitch_a or pitch_b bytes apart, a multiple
// of 16 and at least the row's length; addresses are multiples of 16. Bytes past a row's end are
// not read.
//   fprop: a = x [T, K],                      b = weight [E, N, K]
//   dgrad: a = dy [T, N],                     b = weight transposed [E, K, N]
//   wgrad: a = dy transposed [N, padded],     b = x transposed [K, padded]; dense: [N, T], [K, T]
// Matrices of b follow each other without a gap. In transposed tokens each group is followed by
// zeros up to a multiple of 32; what lies beyond is loaded but not multiplied.
//
// Scales are fp32, value = code * scale; none is read for rows past sum(group_sizes).
//   tensor: [E] or, without `..._per_group`, [1]
//   row:    fprop: scale_a [T], scale_b [E, N];  dgrad: [T], [E, K];  wgrad: [E, N], [E, K]
//   block:  fprop: scale_a [ceil(K, 128), padded_tokens(T, E)], element [k / 128, padded token];
//                  scale_b [E, ceil(N, 128), ceil(K, 128)]
//           dgrad: scale_a [ceil(N, 128), padded_tokens(T, E)];
//                  scale_b as in fprop, the same array: blocks of a transpose are the same blocks
//           wgrad: scale_a [token_scale_blocks(T, E), N], scale_b [token_scale_blocks(T, E), K];
//                  block j of group g, which starts at its token 128 j, is row
//                  begin(g) / 128 + g + j
//           dense: ceil(T, 128) rows; addresses are multiples of 16.
// Results, bias and group_sizes are as `gemm` says.
struct Fp8GemmArguments {
  GemmArguments gemm;
  int64_t pitch_a;
  int64_t pitch_b;
  const float* scale_a;
  const float* scale_b;
  bool scale_a_per_group = true;
  bool scale_b_per_group = true;
};

inline GemmSizes gemm_sizes(Gemm kind, const Fp8GemmArguments& in) {
  return gemm_sizes(kind, in.gemm);
}

}  // namespace fusegen
