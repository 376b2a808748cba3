// Each token's row to the rows of its choices.
//
// A token's row is read once and written choices times, 2 T H + 2 R H bytes, where reading by row
// would read 2 R H: rows are in the order of experts, so that a token's lie far apart. Slots without a
// row and rows without a slot are as many; of the latter, each token writes zeros to those that have
// the numbers of its slots.
//
// Bytes in flight: a thread loads 4 vectors before it stores any, 64 KiB of an SM with 1024 threads,
// where 4.8 TB/s and 0.8 us ask for 29 KiB of each of 132; stores wait for nobody.
#pragma once

#include "fusegen/routing/gather_rows.h"
#include "fusegen/routing/teams.cuh"

namespace fusegen {

namespace routing {

inline constexpr int kLoaded = 4;  // vectors of a thread

static __global__ void __launch_bounds__(kTeamThreads, 4)
    gather(const __grid_constant__ GatherRowsArguments in, const __grid_constant__ Teams teams) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = teams.token();
  if (token >= in.tokens) return;
  const auto rows = uint32_t(in.tokens * in.choices);
  const Map slot_row{static_cast<const int32_t*>(in.slot_row), rows};
  const Map row_slot{static_cast<const int32_t*>(in.row_slot), rows};
  const auto* const x = static_cast<const uint4*>(in.x) + token * teams.vectors;
  auto* const y = static_cast<uint4*>(in.y);
  for (int64_t first = teams.lane(); first < teams.vectors; first += kLoaded * teams.size) {
    uint4 loaded[kLoaded];
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      const int64_t vector = first + int64_t(i) * teams.size;
      if (vector < teams.vectors) loaded[i] = __ldg(x + vector);
    }
    for (int64_t choice = 0; choice < in.choices; ++choice) {
      const int64_t slot = token * in.choices + choice;
      const int64_t row = slot_row.row(slot);
      const bool empty = row_slot.row(slot) < 0;  // the row of the slot's own number
#pragma unroll
      for (int i = 0; i < kLoaded; ++i) {
        const int64_t vector = first + int64_t(i) * teams.size;
        if (vector >= teams.vectors) break;
        if (row >= 0) y[row * teams.vectors + vector] = loaded[i];
        if (empty) y[slot * teams.vectors + vector] = make_uint4(0, 0, 0, 0);
      }
    }
  }
}

}  // namespace routing

// Of whatever element type of 16 bits: bytes are copied.
template <class Element>
static Status launch_gather_rows(const GatherRowsArguments& in, Stream& stream) {
  return routing::launch_teams("cudaLaunchKernelEx(gather_rows)", &routing::gather, in, stream);
}

}  // namespace fusegen
