// The rows of each token's choices, added up in fp32 and in their order, and rounded once.
//
// Each row is read once and each token written once: 2 R H + 2 T H bytes. A thread has one vector of a
// token and loads it of 4 rows before it adds the first. Bytes in flight: 64 of each of 1536 threads,
// 96 KiB of an SM, where 4.8 TB/s and 0.8 us ask for 29 KiB of each of 132; but a token's places in
// the map come first, as long a wait again.
#pragma once

#include "fusegen/routing/combine_rows.h"
#include "fusegen/routing/teams.cuh"

namespace fusegen {

namespace routing {

inline constexpr int kRowsAtOnce = 4;  // rows that a thread loads before it adds

template <class Element>
__device__ __forceinline__ void add_vector(float (&sums)[row::kVector], const uint4& packed) {
  float values[row::kVector];
  row::unpack<Element>(packed, values);
#pragma unroll
  for (int j = 0; j < row::kVector; ++j) sums[j] += values[j];
}

template <class Element>
static __global__ void __launch_bounds__(kTeamThreads, 6)
    combine(const __grid_constant__ CombineRowsArguments in, const __grid_constant__ Teams teams) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = teams.token();
  if (token >= in.tokens) return;
  const auto choices = int32_t(in.choices);
  const Map slot_row{static_cast<const int32_t*>(in.slot_row) + token * choices, uint32_t(in.rows)};
  const auto* const y = static_cast<const uint4*>(in.y);
  const auto* const add = static_cast<const uint4*>(in.add);
  auto* const x = static_cast<uint4*>(in.x) + token * teams.vectors;
  for (int64_t vector = teams.lane(); vector < teams.vectors; vector += teams.size) {
    float sums[row::kVector] = {};
    for (int32_t choice = 0; choice < choices; choice += kRowsAtOnce) {
      int32_t rows[kRowsAtOnce];
      uint4 loaded[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        rows[i] = choice + i < choices ? int32_t(slot_row.row(choice + i)) : -1;
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (rows[i] >= 0) loaded[i] = __ldcs(y + rows[i] * teams.vectors + vector);  // only this once
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) add_vector<Element>(sums, loaded[i]);
    }
    if (add != nullptr) add_vector<Element>(sums, __ldg(add + token * teams.vectors + vector));
    __stcs(x + vector, row::pack<Element>(sums));
  }
}

}  // namespace routing

template <class Element>
static Status launch_combine_rows(const CombineRowsArguments& in, Stream& stream) {
  return routing::launch_teams("cudaLaunchKernelEx(combine_rows)", &routing::combine<Element>, in,
                               stream);
}

}  // namespace fusegen
