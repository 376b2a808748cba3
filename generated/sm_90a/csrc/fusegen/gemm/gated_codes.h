// What an FP8 GEMM is launched with whose result goes through a gated activation and is quantised;
// host side, no device code.
#pragma once

#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/quantize/step.h"

namespace fusegen {

// An fprop whose result, [tokens, n] in the module's own type, is read by an expression of both
// halves of its rows, and what that gives, [tokens, n / 2], by one quantisation:
//   product.gemm.epilogue.other  fp32 [tokens], if the expression is of a value of each row
//   product.gemm.epilogue.aux    the result, or nullptr: not asked for
//   step.quantize.rowwise        the codes
//   step.quantize.columnwise     the same by columns, or not asked for
// Scales are those of delayed scaling, known before. product.gemm.d is not read.
struct GatedCodesArguments {
  Fp8GemmArguments product;
  QuantizeStepArguments step;
};

inline GemmSizes gemm_sizes(Gemm kind, const GatedCodesArguments& in) {
  return gemm_sizes(kind, in.product.gemm);
}

}  // namespace fusegen
