// What is fixed when a kernel of mma.sync is compiled whose operands have scales in atoms, beyond
// what gemm/config.mma.cuh says.
#pragma once

#include <type_traits>

#include "fusegen/common/rows.h"
#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/load/scale_atoms.mma.cuh"
#include "fusegen/load/scaled_addresses.mma.cuh"
#include "fusegen/mainloop/running_sums.mma.cuh"
#include "fusegen/mainloop/split_sums.mma.cuh"
#include "fusegen/mainloop/warp_mma_scaled.mma.cuh"

namespace fusegen {

template <Gemm kind, class Multiply, Accumulation accumulation, class Config>
struct ScaledMmaTraits
    : MmaTileTraits<kind, Multiply, Config,
                    std::conditional_t<accumulation == Accumulation::split, SplitWarpSums, RunningWarpSums>,
                    AtomScales<Multiply>> {
  using Addresses = ScaledAddresses<kind, Multiply::kBits>;
};

// `agrees` of gemm/config.mma.cuh, and the same of what scales add.
template <class Stated, class T, class Config>
constexpr bool agrees_scaled() {
  static_assert(agrees<Stated, T, Config>());
  static_assert(agrees_copies<Stated>());
  static_assert(Stated::scale_block == T::Mma::kBlock, "scale_block: unit against the instruction");
  static_assert(Stated::atom_rows == kAtomRows, "atom_rows: unit against scale_atoms.cuh");
  static_assert(Stated::promotion_interval == T::WarpSums::kInterval,
                "promotion_interval: unit against traits");
  return true;
}

}  // namespace fusegen
