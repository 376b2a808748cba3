// What gathering rows is launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Each token's row to the rows of its choices; rows without a slot are zeros.
struct GatherRowsArguments {
  const void* x;         // [tokens, columns]
  const void* row_slot;  // int32 [tokens * choices]: the slot of each row, -1 where it has none
  const void* slot_row;  // int32 [tokens, choices]: its inverse
  void* y;               // [tokens * choices, columns]
  int64_t tokens;
  int64_t choices;
  int64_t columns;       // a multiple of 8
};

}  // namespace fusegen
