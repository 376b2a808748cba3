// What is fixed when an FP8 kernel is compiled, whatever instruction multiplies its operands.
#pragma once

#include <type_traits>

#include "fusegen/common/rows.h"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/visit/scales.cuh"

namespace fusegen {

// What a kernel is told of its scales; of blocks, `OfBlocks`.
template <Gemm kind, Fp8Scaling scaling, class OfBlocks>
using Fp8Scales = std::conditional_t<
    scaling == Fp8Scaling::block, OfBlocks,
    std::conditional_t<scaling == Fp8Scaling::row, RowAndColumnScales<kind>, TensorScales>>;

// Rows and columns of an operand that share a scale; 0: all of them.
template <Gemm kind, Fp8Scaling scaling>
struct ScaleBlocks {
  static constexpr bool kBlocks = scaling == Fp8Scaling::block;
  static constexpr int kRowsA = scaling == Fp8Scaling::tensor ? 0 : 1;
  static constexpr int kRowsB = kBlocks && kind != Gemm::wgrad ? kScaleBlock : kRowsA;
  static constexpr int kColumns = kBlocks ? kScaleBlock : 0;
};

// What a unit states of its codes, their scales and their sums; see `agrees`.
template <class Stated, Gemm kind, Fp8Scaling scaling, int PromotionInterval>
constexpr bool agrees_codes() {
  using Blocks = ScaleBlocks<kind, scaling>;
  static_assert(agrees_copies<Stated>());
  static_assert(Stated::token_alignment == kTokenAlignment,
                "token_alignment: unit against gemm_fp8.h");
  static_assert(Stated::promotion_interval == PromotionInterval,
                "promotion_interval: unit against traits");
  static_assert(Stated::scale_rows_a == Blocks::kRowsA, "scale_rows_a: unit against ScaleBlocks");
  static_assert(Stated::scale_rows_b == Blocks::kRowsB, "scale_rows_b: unit against ScaleBlocks");
  static_assert(Stated::scale_columns_a == Blocks::kColumns,
                "scale_columns_a: unit against ScaleBlocks");
  static_assert(Stated::scale_columns_b == Blocks::kColumns,
                "scale_columns_b: unit against ScaleBlocks");
  return true;
}

}  // namespace fusegen
