// What combining rows is launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// The rows of each token's choices, added up in their order.
struct CombineRowsArguments {
  const void* y;         // [rows, columns]
  const void* slot_row;  // int32 [tokens, choices]: the row of each slot, others where it has none
  const void* add;       // [tokens, columns], added last, or null
  void* x;               // [tokens, columns]
  int64_t tokens;
  int64_t choices;
  int64_t columns;       // a multiple of 8
  int64_t rows;          // those of all tokens, of whom these may be some
};

}  // namespace fusegen
