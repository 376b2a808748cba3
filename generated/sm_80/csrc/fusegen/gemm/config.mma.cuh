// What is fixed when a kernel of mma.sync is compiled: tile, warps, stages, shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/common/rows.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/limits.h"
#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/load/stage.cuh"
#include "fusegen/load/stage_scales.mma.cuh"
#include "fusegen/mainloop/running_sums.mma.cuh"
#include "fusegen/mainloop/warp_mma.mma.cuh"
#include "fusegen/sink/slab.cuh"
#include "fusegen/tile_source/tile.cuh"
#include "fusegen/tile_source/tile_source.cuh"

namespace fusegen {

// Names one kernel: tile, warps along M and N, stages, CTAs of an SM, limits.
template <int M, int N, int K, int WarpsM, int WarpsN, int Stages, int Ctas, class Limits>
struct MmaConfig {
  static constexpr int tile_m = M;
  static constexpr int tile_n = N;
  static constexpr int tile_k = K;
  static constexpr int warps_m = WarpsM;
  static constexpr int warps_n = WarpsN;
  static constexpr int stages = Stages;
  static constexpr int ctas = Ctas;
  static constexpr int cluster = 1;
  static constexpr int shared_memory = Limits::shared_memory;
  static constexpr int registers = Limits::registers;
};

// What the warps keep in shared memory beside stages and slabs.
template <Gemm kind, class Config>
struct MmaControl {
  Tile tiles[Config::warps_m * Config::warps_n][2];  // of each warp: the tile, and the next one
  typename TileSource<kind, Config>::Order order;
};

// `Multiply` is the instruction, which says how many bits its operands' elements have; `AddUp` how
// its results are added up; `StageScales` what comes with each stage.
template <Gemm kind, class Multiply, class Config, class AddUp = RunningWarpSums,
          class StageScales = NoStageScales>
struct MmaTileTraits {
  using Mma = Multiply;
  using WarpSums = AddUp;
  using Scales = StageScales;
  using Operands = typename Scales::Operands;
  using Source = TileSource<kind, Config>;
  static constexpr int kBits = Mma::kBits;
  static constexpr int kTileRows = Config::tile_m, kTileColumns = Config::tile_n;
  static constexpr int kDepth = Config::tile_k;            // of a stage, in elements
  static constexpr int kDepthBytes = kDepth * kBits / 8;

  static constexpr int kWarps = Config::warps_m * Config::warps_n;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtas = Config::ctas;
  static constexpr int kWarpRows = Config::tile_m / Config::warps_m;
  static constexpr int kWarpColumns = Config::tile_n / Config::warps_n;
  // Registers of a thread, for totals and partial sums.
  static constexpr int kAccumulators =
      kWarpRows * kWarpColumns / 32 * (WarpSums::kInterval > 0 ? 2 : 1);

  // Memory has operands of 16 bits with K contiguous, or with K as the slow dimension; ldmatrix
  // transposes no others.
  static constexpr StageMajor kSlowK = kBits == 16 ? StageMajor::MN : StageMajor::K;
  using A = StageLayout<kind == Gemm::wgrad ? kSlowK : StageMajor::K, Config::tile_m,
                        Config::tile_k, kBits>;
  using B = StageLayout<kind == Gemm::fprop ? StageMajor::K : kSlowK, Config::tile_n,
                        Config::tile_k, kBits>;
  using LinesOfB = EveryLine;
  static constexpr int kStages = Config::stages;
  static constexpr int kScalesAt = A::kBytes + B::kBytes;
  static constexpr int kStageBytes = kScalesAt + Scales::template kBytes<MmaTileTraits>;

  static constexpr int kSlabsAt = kStages * kStageBytes;
  static constexpr int kControlAt = kSlabsAt + kWarps * kSlabBytes;
  static constexpr int kControlBytes = 2048;
  static constexpr int kUsedBytes = kControlAt + kControlBytes;
  static constexpr int kReservedBytes = 1024;  // of every CTA, by CUDA

  static_assert(kStages >= 2);
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "ldmatrix reads 16 by 16");
  static_assert(kDepthBytes % (2 * kStepBytes) == 0, "fragments alternate between two sets of registers");
  static_assert(Config::registers / (kCtas * kThreads) >= kAccumulators + 64,
                "operands and addresses need registers, too");
  static_assert(WarpSums::kInterval % Config::tile_k == 0, "a partial sum is of whole stages");
  static_assert(sizeof(MmaControl<kind, Config>) <= kControlBytes);
  static_assert(kCtas * (kUsedBytes + kReservedBytes) <= Config::shared_memory + kReservedBytes,
                "the SM's shared memory");
  static_assert(Source::Order::kScratchBytes <= kSlabsAt, "groups are sorted in the stages");
};

// Operands of 16 bits.
template <Gemm kind, class Element, class Config, Store store>
struct MmaTraits : MmaTileTraits<kind, WarpMma<Element>, Config> {
  using Tiles = MmaTileTraits<kind, WarpMma<Element>, Config>;
  static_assert(!is_gated(store) || (kind == Gemm::fprop && Tiles::kWarpColumns >= 32),
                "a half of a warp's columns is stored in units of 8");
  using Addresses = std::conditional_t<is_gated(store), GatedAddresses, PlainAddresses<kind>>;
  using LinesOfB =
      std::conditional_t<is_gated(store), HalvesOfWarps<Tiles::kWarpColumns>, EveryLine>;
};

// What a unit states of its kernel, as the generator derived it, is what this file derives: two
// derivations, so that a mistake of either one ends here and not in a result.
template <class Stated, class T, class Config>
constexpr bool agrees() {
  static_assert(agrees_rows<Stated>());
  static_assert(Stated::tile_m == Config::tile_m, "tile_m: unit against MmaConfig");
  static_assert(Stated::tile_n == Config::tile_n, "tile_n: unit against MmaConfig");
  static_assert(Stated::tile_k == Config::tile_k, "tile_k: unit against MmaConfig");
  static_assert(Stated::warps_m == Config::warps_m, "warps_m: unit against MmaConfig");
  static_assert(Stated::warps_n == Config::warps_n, "warps_n: unit against MmaConfig");
  static_assert(Stated::stages == Config::stages, "stages: unit against MmaConfig");
  static_assert(Stated::ctas == Config::ctas, "ctas: unit against MmaConfig");
  static_assert(Stated::element_bits == T::kBits, "element_bits: unit against traits");
  static_assert(Stated::shared_bytes == T::kUsedBytes, "shared_bytes: unit against traits");
  static_assert(Stated::threads == T::kThreads, "threads: unit against traits");
  static_assert(Stated::accumulators == T::kAccumulators, "accumulators: unit against traits");
  return true;
}

}  // namespace fusegen
