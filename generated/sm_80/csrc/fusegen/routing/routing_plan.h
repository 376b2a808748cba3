// What the plan of routing is launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Rows in the order of experts, those of one in the order of slots: slot t * choices + k is choice k
// of token t, and there are as many rows as slots.
struct RoutingPlanArguments {
  const void* ids;        // int32 [tokens, choices]: the expert; outside of 0 to experts - 1 it is none
  const int64_t* counts;  // [experts]: slots of each
  void* slot_row;         // int32 [tokens, choices]: the row of each slot, -1 where it has none
  void* row_slot;         // int32 [tokens * choices]: the slot of each row, -1 where it has none
  int64_t* split_sizes;   // [experts]: rows of each
  void* histograms;       // int32 [parts, experts], overwritten
  int64_t parts;          // blocks that share the slots; 0 where there are none
  int64_t capacity;       // rows of an expert, at most; 0 is no limit
  int64_t tokens;
  int64_t choices;
  int64_t experts;        // 1024 at most
};

}  // namespace fusegen
