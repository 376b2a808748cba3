// Host side of every GEMM whose operands' scales lie in atoms: what its arguments must hold, and
// how many atoms there are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"
#include "fusegen/gemm/arguments.cuh"
#include "fusegen/gemm/gemm_scaled.h"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

template <Gemm kind, int bits>
Status check_scaled_arguments(const ScaledGemmArguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const GemmArguments& g = in.gemm;
  if (Status status = check_arguments(g); !status.ok()) return status;
  const int64_t k = kind == Gemm::fprop ? g.k : kind == Gemm::dgrad ? g.n : g.tokens;
  for (const int64_t pitch : {in.pitch_a, in.pitch_b}) {
    if (pitch * 8 / bits < k || pitch % kPitch != 0) {
      return {kInvalid, "pitch_a and pitch_b: multiples of 16, at least the contraction"};
    }
  }
  if (g.tokens == 0) return {};
  if (in.scale_a == nullptr || in.scale_b == nullptr) return {kInvalid, "scale_a and scale_b"};
  const bool amaxes = in.amax_a != nullptr && in.amax_b != nullptr;
  if (bits == 4 && !amaxes) return {kInvalid, "amax_a and amax_b"};
  return {};
}

// Atoms along the contraction of either operand, and above each other of one matrix of b.
struct AtomCounts {
  int32_t along, rows_b;
};

// `block` elements share a byte.
template <Gemm kind, int block>
AtomCounts atom_counts(const GemmArguments& g) {
  const int64_t rows = kind == Gemm::fprop ? g.n : g.k;
  const RowGroups groups{g.group_sizes, int32_t(g.tokens), int32_t(g.groups)};
  const int64_t length = kind == Gemm::fprop ? g.k : g.n;
  return {kind == Gemm::wgrad ? atoms_along_rows(groups, block) : atoms_along(int32_t(length), block),
          int32_t(blocks(uint32_t(rows), kAtomRows))};
}

}  // namespace fusegen
