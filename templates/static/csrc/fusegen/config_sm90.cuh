// What is fixed when a kernel is compiled: tile, schedule, boxes, stages, shared memory.
#pragma once

#include <cstdint>

#include "epilogue.cuh"
#include "gemm.h"
#include "mma_sm90.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"

namespace fusegen {

enum class Schedule { cooperative, pingpong };

// Names one kernel: tile, cluster size, schedule, least number of store buffers per warp.
template <int M, int N, int K, int Cluster, Schedule schedule_, int Buffers = 2>
struct Config {
  static constexpr int tile_m = M;
  static constexpr int tile_n = N;
  static constexpr int tile_k = K;
  static constexpr int cluster = Cluster;
  static constexpr int buffers = Buffers;
  static constexpr Schedule schedule = schedule_;
};

template <Gemm kind, class Element, class Config>
struct Traits {
  static constexpr int kThreads = 384;
  static constexpr int kMathWarps = 8;
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMathRegisters = 232;
  static constexpr int kSharedBytes = 232448;  // most that one CTA of sm_90 may have

  static constexpr bool kPingpong = Config::schedule == Schedule::pingpong;
  static constexpr bool kRaggedRows = kind != Gemm::wgrad;
  static constexpr Major kMajorA = kind == Gemm::wgrad ? Major::MN : Major::K;
  static constexpr Major kMajorB = kind == Gemm::fprop ? Major::K : Major::MN;
  static constexpr int kRankA = kind == Gemm::wgrad ? 4 : 2;
  static constexpr int kRankB = kind == Gemm::wgrad ? 4 : 3;
  static constexpr int kWaves = Config::tile_m / kMmaRows / (kPingpong ? 1 : 2);

  // Boxes: 64 rows of A each, so that missing rows are not loaded and halves can be shared.
  static constexpr int kBoxesA = Config::tile_m / 64;
  static constexpr int kBoxesB = kMajorB == Major::MN ? Config::tile_n / 64 : 2;
  static constexpr int kBoxWidthB = Config::tile_n / kBoxesB;
  static constexpr int kBoxBytesA = 64 * Config::tile_k * 2;
  static constexpr int kBoxBytesB = kBoxWidthB * Config::tile_k * 2;
  static constexpr int kBytesA = kBoxesA * kBoxBytesA;
  static constexpr int kBytesB = kBoxesB * kBoxBytesB;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  static constexpr int kControlBytes = 2048;  // barriers, tile records, order of groups
  static constexpr int kBufferBytes = kMathWarps * kChunkBytes;  // one buffer of every warp
  static constexpr int kStages =
      (kSharedBytes - kControlBytes - Config::buffers * kBufferBytes) / kStageBytes;
  static constexpr int kSpare = kSharedBytes - kControlBytes - kStages * kStageBytes;
  static constexpr int kChunks = kWaves * Config::tile_n / kChunkColumns;
  static constexpr int kBuffers =
      kSpare / kBufferBytes < kChunks ? kSpare / kBufferBytes : kChunks;
  static constexpr int kUsedBytes = kStages * kStageBytes + kBuffers * kBufferBytes + kControlBytes;

  static_assert(Config::tile_k == kSwizzleElements, "a K-major box is one swizzle atom wide");
  static_assert(kWaves == 1 || kWaves == 2);
  static_assert(kWaves * Config::tile_n <= 384, "accumulators beyond 192 registers");
  static_assert(Config::cluster == 1 || Config::cluster == 2);
  static_assert(kStages >= 3 && kBuffers >= 1);
  static_assert(kBoxBytesA % 1024 == 0 && kBoxBytesB % 1024 == 0, "swizzle atoms are 1024 bytes");
};

template <class Traits, class Config>
struct Control {
  StageBarriers<Traits::kStages> stages;
  Barrier turn[2];
  TileRing ring;
  uint16_t order[DepthWalk<Config>::kSortedGroups];
};

}  // namespace fusegen
