// The rows of each token's choices, added up in fp32 and in their order, and rounded once.
//
// Each row is read once and each token written once: 2 R H + 2 T H bytes. Bytes in flight: a thread
// loads vectors of 4 rows at two places before it adds the first, 128 bytes, 96 KiB of an SM with 768
// threads, where 4.8 TB/s and 0.8 us ask for 29 KiB of each of 132.
#pragma once

#include "fusegen/routing/combine_rows.h"
#include "fusegen/routing/teams.cuh"

namespace fusegen {

namespace routing {

inline constexpr int kPlaces = 2;      // vectors of a row that a thread adds up at once
inline constexpr int kRowsAtOnce = 4;  // rows that it loads before it adds

template <class Element>
__device__ __forceinline__ void add_vector(float (&sums)[row::kVector], const uint4& packed) {
  float values[row::kVector];
  row::unpack<Element>(packed, values);
#pragma unroll
  for (int j = 0; j < row::kVector; ++j) sums[j] += values[j];
}

template <class Element>
static __global__ void __launch_bounds__(kTeamThreads, 3)
    combine(const __grid_constant__ CombineRowsArguments in, const __grid_constant__ Teams teams) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = teams.token();
  if (token >= in.tokens) return;
  const Map slot_row{static_cast<const int32_t*>(in.slot_row), uint32_t(in.rows)};
  const auto* const y = static_cast<const uint4*>(in.y);
  const auto* const add = static_cast<const uint4*>(in.add);
  auto* const x = static_cast<uint4*>(in.x) + token * teams.vectors;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  for (int64_t first = teams.lane(); first < teams.vectors; first += kPlaces * teams.size) {
    const int64_t vector[kPlaces] = {first, first + teams.size};
    const bool there[kPlaces] = {true, vector[1] < teams.vectors};
    float sums[kPlaces][row::kVector] = {};
    for (int64_t choice = 0; choice < in.choices; choice += kRowsAtOnce) {
      uint4 loaded[kRowsAtOnce][kPlaces];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const bool is_choice = choice + i < in.choices;
        const int64_t found = is_choice ? slot_row.row(token * in.choices + choice + i) : -1;
#pragma unroll
        for (int p = 0; p < kPlaces; ++p) {
          loaded[i][p] = zeros;
          if (found >= 0 && there[p]) loaded[i][p] = __ldg(y + found * teams.vectors + vector[p]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
        for (int p = 0; p < kPlaces; ++p) add_vector<Element>(sums[p], loaded[i][p]);
      }
    }
#pragma unroll
    for (int p = 0; p < kPlaces; ++p) {
      if (!there[p]) break;
      if (add != nullptr) {
        add_vector<Element>(sums[p], __ldg(add + token * teams.vectors + vector[p]));
      }
      x[vector[p]] = row::pack<Element>(sums[p]);
    }
  }
}

}  // namespace routing

template <class Element>
static Status launch_combine_rows(const CombineRowsArguments& in, Stream& stream) {
  return routing::launch_teams("cudaLaunchKernelEx(combine_rows)", &routing::combine<Element>, in,
                               stream);
}

}  // namespace fusegen
