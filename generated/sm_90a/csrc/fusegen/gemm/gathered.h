// What a GEMM is launched with one of whose operands is read by its rows where tokens lie, and not in
// the order of groups; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/launch/arriving.h"

namespace fusegen {

enum class Gather { none, a, b };

// The operand that is gathered has gemm.tokens / choices rows. Row r of those that the GEMM multiplies is
// that of token row_slot[r] / choices, of zeros where row_slot[r] is none of the [0, gemm.tokens) slots.
// Where tokens arrive while it runs, slots ascend within each group, what is no slot behind them.
struct GatheredGemmArguments {
  GemmArguments gemm;
  const void* row_slot;  // int32 [gemm.tokens] on the device
  int64_t choices;
  Arriving* arriving = nullptr;  // nullptr: all tokens are there
};

inline GemmSizes gemm_sizes(Gemm kind, const GatheredGemmArguments& in) {
  return gemm_sizes(kind, in.gemm);
}

}  // namespace fusegen
