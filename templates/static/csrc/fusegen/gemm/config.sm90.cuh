// What is fixed when a kernel is compiled: tile, schedule, boxes, stages, shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/gemm/gathered.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/limits.h"
#include "fusegen/load/coordinates.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/tile_source/across.cuh"
#include "fusegen/tile_source/tile_source.cuh"

namespace fusegen {

enum class Schedule { cooperative, pingpong };

// Names one kernel: tile, cluster size, schedule, limits, least number of store buffers per warp.
template <int M, int N, int K, int Cluster, Schedule schedule_, class Limits, int Buffers = 2>
struct Config {
  static constexpr int tile_m = M;
  static constexpr int tile_n = N;
  static constexpr int tile_k = K;
  static constexpr int cluster = Cluster;
  static constexpr int buffers = Buffers;
  static constexpr int shared_memory = Limits::shared_memory;
  static constexpr int registers = Limits::registers;
  static constexpr Schedule schedule = schedule_;
};

// Tile, boxes, stages and store buffers. `ExtraBytes` of every stage lie behind all stages.
template <class Config, int ElementBytes, int BoxesB, Store store, int ExtraBytes = 0,
          int ControlBytes = 2048>
struct TileTraits {
  static constexpr int kTileN = Config::tile_n;
  static constexpr int kTileK = Config::tile_k;
  static constexpr int kCluster = Config::cluster;
  static constexpr bool kPingpong = Config::schedule == Schedule::pingpong;
  // Two math warpgroups, or three with fewer registers each, which hide more of each other's
  // waiting.
  static constexpr int kMathGroups = !kPingpong && Config::tile_m == 3 * kMmaRows ? 3 : 2;
  static constexpr int kMathWarps = 4 * kMathGroups;
  static constexpr int kThreads = 128 + 32 * kMathWarps;
  static constexpr int kCtas = 1;  // on an SM
  static constexpr int kLoaderRegisters = kMathGroups == 2 ? 40 : ExtraBytes > 0 ? 56 : 32;
  // What loaders leave of an SM's registers, shared by one thread of each warpgroup; in eights.
  static constexpr int kMathRegisters =
      (Config::registers / 128 - kLoaderRegisters) / kMathGroups / 8 * 8;

  static constexpr int kWaves = Config::tile_m / kMmaRows / (kPingpong ? 1 : kMathGroups);
  static constexpr int kMmaK = kMmaKBytes / ElementBytes;

  // Boxes: 64 rows of A each, so that missing rows are not loaded and halves can be shared.
  static constexpr int kBoxRowsA = 64;
  static constexpr int kBoxesA = Config::tile_m / kBoxRowsA;
  static constexpr int kBoxesB = BoxesB;
  static constexpr int kBoxWidthB = Config::tile_n / kBoxesB;
  static constexpr int kBoxBytesA = kBoxRowsA * Config::tile_k * ElementBytes;
  static constexpr int kBoxBytesB = kBoxWidthB * Config::tile_k * ElementBytes;
  static constexpr int kBytesA = kBoxesA * kBoxBytesA;
  static constexpr int kBytesB = kBoxesB * kBoxBytesB;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  static constexpr int kControlBytes = ControlBytes;  // barriers, tile records, order of groups
  static constexpr int kBufferBytes = kMathWarps * kChunkBytes;  // one buffer of every warp
  static constexpr int stages_beside(int buffers) {
    return (Config::shared_memory - kControlBytes - buffers * kBufferBytes) /
           (kStageBytes + ExtraBytes);
  }
  // Values that results meet wait in buffers, too; four stages are worth more.
  static constexpr int kLeastBuffers = loads(store) && stages_beside(4) >= 4 ? 4 : Config::buffers;
  static constexpr int kStages = stages_beside(kLeastBuffers);
  static constexpr int kExtraBytes = (kStages * ExtraBytes + 1023) / 1024 * 1024;  // of all stages
  static constexpr int kSpare =
      Config::shared_memory - kControlBytes - kStages * kStageBytes - kExtraBytes;
  static constexpr int kChunks = kWaves * Config::tile_n / kChunkColumns;
  static constexpr int kBuffers =
      kSpare / kBufferBytes < kChunks ? kSpare / kBufferBytes : kChunks;
  static constexpr int kExtraAt = kStages * kStageBytes;
  static constexpr int kBuffersAt = kExtraAt + kExtraBytes;
  static constexpr int kControlAt = kBuffersAt + kBuffers * kBufferBytes;
  static constexpr int kUsedBytes = kControlAt + kControlBytes;
  static constexpr int kElementBytes = ElementBytes;
  static constexpr int kAccumulators = kWaves * Config::tile_n / 2;  // registers of a thread

  static_assert(Config::tile_k * ElementBytes == kSwizzleBytes,
                "a K-major box is one swizzle atom wide");
  static_assert(kWaves == 1 || kWaves == 2);
  static_assert(kAccumulators <= 192, "registers hold more than accumulators");
  static_assert(Config::cluster == 1 || Config::cluster == 2);
  static_assert(kStages >= 3 && kBuffers >= 1);
  static_assert(kBoxBytesA % 1024 == 0 && kBoxBytesB % 1024 == 0, "swizzle atoms are 1024 bytes");

  static constexpr Gather kGather = Gather::none;
  static constexpr int kGatherWarps = 0;  // of the two that gather, those that fill a stage
};

template <Gemm kind, class Config>
inline constexpr int kBoxesOfB = kind == Gemm::fprop ? 2 : Config::tile_n / 64;

// The rows of `Config` are of the operand that is gathered, its columns of the one that clusters share.
template <class Config, Gather gather>
using Tiles = std::conditional_t<gather == Gather::b, Transposed<Config>, Config>;

// Rows that are gathered may arrive in two parts.
template <class Config, Gather gather>
using PartOf = std::conditional_t<gather == Gather::a, BlocksOfSlots<Config::tile_m>, AllBlocks>;

// 16-bit operands.
template <Gemm kind, class Element, class Config, Store store, Gather gather = Gather::none>
struct Traits
    : TileTraits<Tiles<Config, gather>, 2, kBoxesOfB<kind, Tiles<Config, gather>>, store> {
  static constexpr Gemm kKind = kind;
  static constexpr Store kStore = store;
  static constexpr Gather kGather = gather;
  static constexpr int kGatherWarps = gather == Gather::none ? 0 : kind == Gemm::wgrad ? 2 : 1;
  using Walk = Walker<kind, Tiles<Config, gather>>;
  using Source = std::conditional_t<gather == Gather::b, AcrossWalk<Tiles<Config, gather>>,
                                    TileSource<kind, Config, PartOf<Config, gather>>>;
  static_assert(kind == Gemm::fprop || !is_gated(store));
  static_assert(gather != Gather::b || kind == Gemm::wgrad, "weights are not gathered");
  using Coordinates = std::conditional_t<is_gated(store), GatedCoordinates<Config::tile_n / 2>,
                                         PlainCoordinates<kind>>;
  static constexpr Major kMajorA = kind == Gemm::wgrad ? Major::MN : Major::K;
  static constexpr Major kMajorB = kind == Gemm::fprop ? Major::K : Major::MN;
  using Mma = WarpgroupMma<Element, kMajorA, kMajorB>;
};

// What a unit states of its kernel, as the generator derived it, is what this file derives: two
// derivations, so that a mistake of either one ends here and not in a result.
template <class Stated, class T, class Config>
constexpr bool agrees() {
  static_assert(agrees_rows<Stated>());
  static_assert(Stated::tile_m == Config::tile_m, "tile_m: unit against Config");
  static_assert(Stated::tile_n == Config::tile_n, "tile_n: unit against Config");
  static_assert(Stated::tile_k == Config::tile_k, "tile_k: unit against Config");
  static_assert(Stated::cluster == Config::cluster, "cluster: unit against Config");
  static_assert(Stated::element_bytes == T::kElementBytes, "element_bytes: unit against traits");
  static_assert(Stated::stages == T::kStages, "stages: unit against traits");
  static_assert(Stated::store_buffers == T::kBuffers, "store_buffers: unit against traits");
  static_assert(Stated::shared_bytes == T::kUsedBytes, "shared_bytes: unit against traits");
  static_assert(Stated::threads == T::kThreads, "threads: unit against traits");
  static_assert(Stated::math_warpgroups == T::kMathGroups, "math_warpgroups: unit against traits");
  static_assert(Stated::loader_registers == T::kLoaderRegisters,
                "loader_registers: unit against traits");
  static_assert(Stated::math_registers == T::kMathRegisters,
                "math_registers: unit against traits");
  static_assert(Stated::accumulators == T::kAccumulators, "accumulators: unit against traits");
  return true;
}

}  // namespace fusegen
