// What is fixed when a kernel of tensor memory is compiled: tile, boxes, stages, shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fusegen/common/rows.h"
#include "fusegen/gemm/config_fp8.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/gemm/gemm_fp8.h"
#include "fusegen/gemm/limits.h"
#include "fusegen/load/coordinates.sm90.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/load/stage.cuh"
#include "fusegen/mainloop/tensor_sums.sm100.cuh"
#include "fusegen/mainloop/umma.sm100.cuh"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/sink/chunk.sm90.cuh"
#include "fusegen/tile_source/tile_source.cuh"

namespace fusegen {

// Names one kernel: tile, accumulators in tensor memory, CTAs that share an MMA, limits. A pair of CTAs
// makes one tile: each has half of its rows, and loads half of the columns of B.
template <int M, int N, int K, int Sums, int CtasPerMma, class Limits>
struct Tcgen05Config {
  static constexpr int tile_m = M / CtasPerMma;  // of a CTA
  static constexpr int tile_n = N;
  static constexpr int tile_k = K;
  static constexpr int sums = Sums;
  static constexpr int cluster = CtasPerMma;
  static constexpr int shared_memory = Limits::shared_memory;

  // As tile sources see it, which find tiles of both.
  struct Whole {
    static constexpr int tile_m = M;
    static constexpr int tile_n = N;
    static constexpr int cluster = 1;
  };

  static_assert(CtasPerMma == 1 || CtasPerMma == 2, "an MMA is of one CTA, or of a pair");
};

// `A_` and `B_` are elements of operands, `a` and `b` which way they lie in memory; `ScaleBlock` of
// them share a scale that comes with a stage, 0: none does.
template <tcgen05::Kind mma, class A_, class B_, StageMajor a, StageMajor b, class Config, Store store,
          int ScaleBlock = 0>
struct Tcgen05TileTraits {
  using A = A_;
  using B = B_;
  static constexpr StageMajor kMajorA = a;
  static constexpr StageMajor kMajorB = b;
  static constexpr Store kStore = store;
  static constexpr tcgen05::Kind kMma = mma;
  static constexpr int kBits = UmmaElement<A>::kBits;
  static constexpr int kTileM = Config::tile_m;
  static constexpr int kTileN = Config::tile_n;
  static constexpr int kTileK = Config::tile_k;
  static constexpr int kMmaK = kMmaKBytes * 8 / kBits;
  static constexpr int kCluster = Config::cluster;
  static constexpr int kCtas = 1;  // on an SM

  // Warps by role: one loads, one finds tiles, one asks for MMAs, one rests, and each of four
  // stores the lanes of tensor memory that it reaches.
  static constexpr int kStoringWarps = 4;
  static constexpr int kThreads = 32 * (4 + kStoringWarps);

  // A K-major box has no more rows than a group may lack; any other one is a swizzle's row wide.
  static constexpr int kBoxRowsA = a == StageMajor::K ? 64 : kSwizzleBytes * 8 / kBits;
  // Of a gated result, a box of B is of one half of the weight's rows.
  static constexpr int kBoxWidthB = b != StageMajor::K             ? kSwizzleBytes * 8 / kBits
                                    : is_gated(store) && kTileN < 256 ? kTileN / 2
                                                                   : 128;
  static constexpr int kLoadedN = kTileN / kCluster;  // columns of B that a CTA loads
  static constexpr int kBoxesA = kTileM / kBoxRowsA;
  static constexpr int kBoxesB = kLoadedN / kBoxWidthB;
  static constexpr int kBoxBytesA = kBoxRowsA * kTileK * kBits / 8;
  static constexpr int kBoxBytesB = kBoxWidthB * kTileK * kBits / 8;
  static constexpr int kBytesA = kBoxesA * kBoxBytesA;
  static constexpr int kBytesB = kBoxesB * kBoxBytesB;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  // Scales of a stage: atoms along the contraction of 128 rows of A, then for each of them those of
  // 128 columns of B, as neighbours.
  static constexpr int kScaleBlock = ScaleBlock;
  static constexpr int kAtoms = ScaleBlock == 0 ? 0 : kTileK / (kAtomBlocks * ScaleBlock);
  static constexpr int kAtomsOfB = kTileN / kAtomRows;
  static constexpr int kAtomColumns = 4;  // of tensor memory
  static constexpr int kScaleBytes = kAtoms * (1 + kAtomsOfB) * kAtomBytes;

  static constexpr int kSums = Config::sums;
  static constexpr int kUsedColumns = kSums * kTileN + kAtoms * (1 + kAtomsOfB) * kAtomColumns;
  static constexpr int kTensorColumns = kUsedColumns <= 128 ? 128 : kUsedColumns <= 256 ? 256 : 512;
  using Sums = SumBarriers<kSums, kTileN>;

  static constexpr int kControlBytes = 2048;  // barriers, tile records, order of groups
  static constexpr int kBufferBytes = kStoringWarps * kChunkBytes;  // one buffer of every warp
  static constexpr int kLeastBuffers = loads(store) ? 4 : 2;
  static constexpr int kStages =
      (Config::shared_memory - kControlBytes - kLeastBuffers * kBufferBytes) /
      (kStageBytes + kScaleBytes);
  static constexpr int kExtraBytes = (kStages * kScaleBytes + 1023) / 1024 * 1024;  // of all stages
  static constexpr int kSpare =
      Config::shared_memory - kControlBytes - kStages * kStageBytes - kExtraBytes;
  static constexpr int kChunks = 2 * kTileN / kChunkColumns;  // of a warp, in 16 bits
  static constexpr int kBuffers =
      kSpare / kBufferBytes < kChunks ? kSpare / kBufferBytes : kChunks;
  static constexpr int kExtraAt = kStages * kStageBytes;
  static constexpr int kBuffersAt = kExtraAt + kExtraBytes;
  static constexpr int kControlAt = kBuffersAt + kBuffers * kBufferBytes;
  static constexpr int kUsedBytes = kControlAt + kControlBytes;

  static_assert(kBits == UmmaElement<B>::kBits);
  static_assert(kTileK * kBits == 8 * kSwizzleBytes, "a K-major box is one swizzle atom wide");
  using Peer = PeerBarriers<kStages, kCluster>;

  static_assert(kTileM == 128, "a CTA has a row for each lane of tensor memory");
  static_assert(kLoadedN % 128 == 0, "boxes of B are 128 columns, of either half");
  static_assert(kTileN == 128 || kTileN == 256, "boxes of 128 columns; an MMA has 256 at most");
  static_assert(kSums == 1 || kSums == 2, "one is read while the other one is added to");
  static_assert(kUsedColumns <= 512, "tensor memory has 512 columns");
  static_assert(kStages >= 3 && kBuffers >= 1);
  static_assert(kBoxBytesA % 1024 == 0 && kBoxBytesB % 1024 == 0, "swizzle atoms are 1024 bytes");
};

// Operands lie as modules have them, but for those of 4 bits, which are transposed where their
// contraction would not be contiguous.
template <Gemm kind, int bits>
inline constexpr StageMajor kMajorOfA =
    bits > 4 && kind == Gemm::wgrad ? StageMajor::MN : StageMajor::K;
template <Gemm kind, int bits>
inline constexpr StageMajor kMajorOfB =
    bits > 4 && kind != Gemm::fprop ? StageMajor::MN : StageMajor::K;

// Operands of 16 bits.
template <Gemm kind, class Element, class Config, Store store>
struct Tcgen05Traits : Tcgen05TileTraits<tcgen05::Kind::f16, Element, Element, kMajorOfA<kind, 16>,
                                         kMajorOfB<kind, 16>, Config, store> {
  static constexpr Gemm kKind = kind;
  using Walk = Walker<kind, typename Config::Whole>;
  using Source = TileSource<kind, typename Config::Whole>;
  static_assert(kind == Gemm::fprop || !is_gated(store));
  using Coordinates = std::conditional_t<is_gated(store), GatedCoordinates<Config::tile_n / 2>,
                                         PlainCoordinates<kind>>;
};

// Codes of 8 bits.
template <Gemm kind, class A, class B, class Config, Store store>
struct Fp8Tcgen05Traits : Tcgen05TileTraits<tcgen05::Kind::f8f6f4, A, B, kMajorOfA<kind, 8>,
                                            kMajorOfB<kind, 8>, Config, store> {
  static constexpr Gemm kKind = kind;
  using Walk = Walker<kind, typename Config::Whole>;
  using Source = TileSource<kind, typename Config::Whole>;
  using Coordinates = PlainCoordinates<kind>;
};

// What a unit states of its kernel, as the generator derived it, is what this file derives: two
// derivations, so that a mistake of either one ends here and not in a result.
template <class Stated, class T, class Config>
constexpr bool agrees() {
  static_assert(agrees_rows<Stated>());
  static_assert(Stated::ctas_per_mma == Config::cluster, "ctas_per_mma: unit against Tcgen05Config");
  static_assert(Stated::tile_m == Config::Whole::tile_m, "tile_m: unit against Tcgen05Config");
  static_assert(Stated::tile_n == Config::tile_n, "tile_n: unit against Tcgen05Config");
  static_assert(Stated::tile_k == Config::tile_k, "tile_k: unit against Tcgen05Config");
  static_assert(Stated::sums == Config::sums, "sums: unit against Tcgen05Config");
  static_assert(Stated::element_bits == T::kBits, "element_bits: unit against traits");
  static_assert(Stated::stages == T::kStages, "stages: unit against traits");
  static_assert(Stated::store_buffers == T::kBuffers, "store_buffers: unit against traits");
  static_assert(Stated::shared_bytes == T::kUsedBytes, "shared_bytes: unit against traits");
  static_assert(Stated::tensor_columns == T::kTensorColumns, "tensor_columns: unit against traits");
  static_assert(Stated::threads == T::kThreads, "threads: unit against traits");
  return true;
}

// The same of what FP8 operands add, whose sums are never promoted. No group of tokens has a place of
// its own, so that none is stated.
template <class Stated, Gemm kind, Fp8Scaling scaling, class T, class Config>
constexpr bool agrees_fp8() {
  using Blocks = ScaleBlocks<kind, scaling>;
  static_assert(agrees<Stated, T, Config>() && agrees_copies<Stated>());
  static_assert(Stated::promotion_interval == 0, "promotion_interval: unit against sums");
  static_assert(Stated::scale_rows_a == Blocks::kRowsA, "scale_rows_a: unit against ScaleBlocks");
  static_assert(Stated::scale_rows_b == Blocks::kRowsB, "scale_rows_b: unit against ScaleBlocks");
  static_assert(Stated::scale_columns_a == Blocks::kColumns,
                "scale_columns_a: unit against ScaleBlocks");
  static_assert(Stated::scale_columns_b == Blocks::kColumns,
                "scale_columns_b: unit against ScaleBlocks");
  return true;
}

}  // namespace fusegen
