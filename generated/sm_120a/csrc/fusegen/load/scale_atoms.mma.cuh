// Scales of both operands that come with a stage, as the whole atoms that it has a part of: see
// load/stage_scales.mma.cuh and quantize/scale_atoms.cuh.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/load/async.mma.cuh"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

struct ScaledOperands : MmaOperands {
  const uint8_t* scale_a;
  const uint8_t* scale_b;
  int32_t atoms;   // along the contraction, of 128 rows of either operand
  int32_t rows_b;  // atoms above each other of one weight
};

template <class Mma>
struct AtomScales {
  using Operands = ScaledOperands;
  static constexpr int kDepth = kAtomBlocks * Mma::kBlock;  // of an atom, in elements

  // Atoms along the contraction of which a stage has a part.
  template <class T>
  static constexpr int kAlong = T::kDepth > kDepth ? T::kDepth / kDepth : 1;
  template <class T>
  static constexpr int kBytesA = T::kTileRows / kAtomRows * kAlong<T> * kAtomBytes;
  template <class T>
  static constexpr int kBytes = kBytesA<T> + T::kTileColumns / kAtomRows * kAlong<T> * kAtomBytes;

  // A thread's 16 bytes of each stage, if it has any.
  template <Gemm kind, class T>
  class Copies {
    static constexpr int kChunks = kBytes<T> / 16, kChunksA = kBytesA<T> / 16;
    static constexpr int kAtomChunks = kAtomBytes / 16;
    static_assert(kChunks <= T::kThreads);
    static_assert(T::kTileRows % kAtomRows == 0 && T::kTileColumns % kAtomRows == 0,
                  "a tile has whole atoms");
    static_assert(T::kDepth % kDepth == 0 || kDepth % T::kDepth == 0);

   public:
    __device__ void start(const ScaledOperands& in, const Tile& tile, const Shape& shape) {
      const int32_t chunk = int32_t(threadIdx.x), own = chunk < kChunksA ? chunk : chunk - kChunksA;
      const int32_t atom = own / kAtomChunks;
      first_ = atom % kAlong<T> * kDepth;
      const int32_t row = atom / kAlong<T>;  // of 128
      const int32_t extent = chunk < kChunksA ? tile.rows : columns(shape) - tile.column;
      exists_ = chunk < kChunks && row * kAtomRows < extent;
      const int32_t above = (chunk < kChunksA ? rows_of_a(tile) : rows_of_b(in, tile)) + row;
      const int64_t at = int64_t(above) * in.atoms + along(tile) + atom % kAlong<T>;
      from_ = (chunk < kChunksA ? in.scale_a : in.scale_b) + at * kAtomBytes + own % kAtomChunks * 16;
      done_ = 0;
    }

    // `left`: elements of the contraction from this stage on.
    __device__ void copy(uint32_t stage, int32_t left) {
      if (threadIdx.x >= kChunks) return;
      const bool any = exists_ && first_ < left;
      copy_async(stage + threadIdx.x * 16, from_ + int64_t(done_ / kDepth) * kAtomBytes, any ? 16 : 0);
      done_ += T::kDepth;
    }

   private:
    __device__ static int32_t columns(const Shape& shape) { return kind == Gemm::fprop ? shape.n : shape.k; }
    // A group's tokens begin an atom.
    __device__ static int32_t first_of_group(const Tile& tile) { return tile.begin / kAtomRows + tile.group; }
    __device__ static int32_t rows_of_a(const Tile& tile) {
      return tile.row / kAtomRows + (kind == Gemm::wgrad ? 0 : first_of_group(tile));
    }
    __device__ static int32_t rows_of_b(const ScaledOperands& in, const Tile& tile) {
      return tile.column / kAtomRows + (kind == Gemm::wgrad ? 0 : tile.group * in.rows_b);
    }
    __device__ static int32_t along(const Tile& tile) {
      return kind == Gemm::wgrad ? first_of_group(tile) * (kAtomRows / kDepth) : 0;
    }

    const uint8_t* from_;
    int32_t done_ = 0;   // elements of the tile's contraction
    int32_t first_ = 0;  // of the thread's atom in its stage
    bool exists_ = false;
  };

  // Of the lanes that hand a warp's scales to the instruction.
  template <class T>
  class Words {
    static constexpr int kRowBlocks = T::kWarpRows / 16, kColumnBlocks = T::kWarpColumns / 8;
    static constexpr int kParts = kDepth > T::kDepth ? kDepth / T::kDepth : 1;  // stages of an atom
    static_assert(T::kWarpRows % 32 == 0 && T::kWarpColumns % 32 == 0, "of which neighbours are words apart");

   public:
    struct Registers {
      uint32_t a[kRowBlocks], b[kColumnBlocks];
    };

    // `row` and `column`: the warp's first in the tile. Of A the first lane of four has row q and the
    // second one row q + 8; of B the first has column q.
    __device__ Words(uint32_t row, uint32_t column, uint32_t lane)
        : a_(at(row + lane / 4 + lane % 2 * 8)), b_(kBytesA<T> + at(column + lane / 4)) {}

    __device__ void start() { part_ = 0; }
    __device__ void advance() { part_ = (part_ + 1) % kParts; }

    // `stage`: where its scales lie.
    __device__ void load(Registers& out, uint32_t stage, int step) const {
      const uint32_t from = stage + part_ * T::kDepth / Mma::kBlock + offset(step);
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) out.a[i] = load_one(from + a_ + of_block(16 * i));
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) out.b[j] = load_one(from + b_ + of_block(8 * j));
    }

   private:
    static constexpr uint32_t kRowBytes = kAlong<T> * kAtomBytes;  // of 128 rows

    __device__ static uint32_t at(uint32_t row) { return row / kAtomRows * kRowBytes + atom_word(row % kAtomRows); }
    // From a row that is below 16 of 32, and of whose warp the first is a multiple of 32.
    __device__ static constexpr uint32_t of_block(uint32_t rows) {
      return rows % 32 * kAtomRowBytes + rows / 32 * kAtomBlocks;
    }
    // A step has all blocks of an atom, or one.
    __device__ static constexpr uint32_t offset(int step) {
      return Mma::kStepBlocks == kAtomBlocks ? uint32_t(step * kAtomBytes) : uint32_t(step);
    }
    __device__ static uint32_t load_one(uint32_t address) {
      if constexpr (Mma::kStepBlocks == kAtomBlocks) {
        return load_shared_word(address);
      } else {
        return load_shared_byte(address);
      }
    }

    uint32_t a_, b_;     // of the lane's first row and column
    uint32_t part_ = 0;  // of the atom, that the stage has
  };

  template <class, class Registers>
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b,
                                      const Registers& scales, int row, int column) {
    Mma::multiply_add(d, a, b, scales.a[row], scales.b[column]);
  }
};

}  // namespace fusegen
