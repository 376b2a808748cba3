// What a GEMM is launched with, and the sizes that selection rules ask about; host side,
// no device code.
#pragma once

#include <array>
#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// With x [T, K], weight [E, N, K] and dy [T, N], per group:
enum class Gemm {
  fprop,  // y = x weight^T + bias:  rows are tokens, columns N, k is K
  dgrad,  // dx = dy weight:         rows are tokens, columns K, k is N
  wgrad,  // dweight = dy^T x:       rows are N, columns K, k is the group's tokens
};

// What becomes of a result.
enum class Store {
  io,           // written in the module's own type
  scaled_bias,  // the same, each row's bias times a scale of that row; fprop alone
  unary,        // as io, and then changed by expressions of it; fprop and dgrad
  unary_aux,    // the same, and what it was before them goes to a tensor of its own, if asked for
  binary,       // the same, one of the expressions is of another tensor, too
  gated,        // an expression of both halves of its row and of a value per row; fprop alone
  gated_aux,    // the same, and the row before it goes to a tensor of its own, if asked for
  fp32,         // written in fp32
  add,          // added in fp32 to what is there; wgrad alone
  add_io,       // rounded to the module's own type and added in it to what is there; wgrad alone
};
constexpr bool adds(Store store) { return store == Store::add || store == Store::add_io; }
constexpr bool is_gated(Store store) { return store == Store::gated || store == Store::gated_aux; }
constexpr bool has_aux(Store store) {
  return store == Store::unary_aux || store == Store::gated_aux;
}
constexpr bool changes(Store store) {
  return store == Store::unary || has_aux(store) || store == Store::binary || is_gated(store);
}
// Whether results meet what a tensor has in their place.
constexpr bool loads(Store store) { return adds(store) || store == Store::binary; }
constexpr bool is_wide(Store store) { return store == Store::fp32 || store == Store::add; }

// What expressions of a result read besides it, and where it goes without them.
inline constexpr int kMostScalars = 8;
struct EpilogueArguments {
  const void* other = nullptr;  // of the result's shape; where that is gated, fp32 [tokens]
  std::array<float, kMostScalars> scalars = {};  // of all expressions, in their order
  void* aux = nullptr;  // the result before them, nullptr: not asked for; where the store has one
};

// Row-major operands. n = out_features and k = in_features in all three kinds.
//   fprop: a = x [T, K], b = weight [E, N, K], d = y [T, N], bias [E, N] or nullptr
//   dgrad: a = dy [T, N], b = weight [E, N, K], d = dx [T, K]
//   wgrad: a = dy [T, N], b = x [T, K], d = dweight [E, N, K]
// A gated d is [T, N / 2], its N a multiple of 16: weight and bias have the first halves first.
// Rows of y and dx past sum(group_sizes) come out zero, or stay as they are; empty groups give zero
// dweight, and where it is added to something, leave that alone.
struct GemmArguments {
  const void* a;
  const void* b;
  const void* bias;
  void* d;
  const int64_t* group_sizes;  // [groups] on the device; nullptr: dense, groups = 1
  int64_t tokens;
  int64_t groups;
  int64_t n;
  int64_t k;
  int sm_count;
  const float* row_scales = nullptr;  // [tokens], which Store::scaled_bias multiplies bias by
  EpilogueArguments epilogue = {};
  bool clears = true;  // rows past sum(group_sizes)
};

// What the result of a GEMM of decoded operands is multiplied by, for one of them, in fp32: scales
// that are constant along the contraction. Codes are decoded as they are then, which is exact.
enum class EndScale {
  none,    // elements were decoded by their scales
  tensor,  // [groups]
  row,     // one per row of the operand as the GEMM reads it: of a [tokens], in wgrad [groups, n];
           // of b [groups, n], in dgrad and wgrad [groups, k]
};

// A GEMM of operands decoded to bf16, which `EndScale` of each says the fields of. Without one, the
// result is multiplied by amax_a amax_b / (448 6)^2 of its group where they are given: what blocks
// below scales of groups (NVFP4) leave for the end. No scale is read for rows past sum(group_sizes).
struct DecodedGemmArguments {
  GemmArguments gemm;
  const float* amax_a;  // [groups] or nullptr
  const float* amax_b;  // [groups] or nullptr
  const float* scale_a = nullptr;  // nullptr: EndScale::none
  const float* scale_b = nullptr;
};

// Group sizes are known to the device alone, so rules see their mean.
struct GemmSizes {
  int64_t tokens;
  int64_t groups;
  int64_t mean_group_tokens;
  int64_t rows;
  int64_t columns;
  int64_t k;
  int64_t sms;
};

inline GemmSizes gemm_sizes(Gemm kind, const GemmArguments& in) {
  const int64_t mean = in.groups > 0 ? in.tokens / in.groups : 0;
  switch (kind) {
    case Gemm::fprop: return {in.tokens, in.groups, mean, in.tokens, in.n, in.k, in.sm_count};
    case Gemm::dgrad: return {in.tokens, in.groups, mean, in.tokens, in.k, in.n, in.sm_count};
    case Gemm::wgrad: return {in.tokens, in.groups, mean, in.n, in.k, mean, in.sm_count};
  }
  return {};
}

inline GemmSizes gemm_sizes(Gemm kind, const DecodedGemmArguments& in) {
  return gemm_sizes(kind, in.gemm);
}

}  // namespace fusegen
