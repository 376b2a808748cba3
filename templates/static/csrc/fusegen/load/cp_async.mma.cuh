// Operands from global memory into a ring of stages by cp.async: every thread copies chunks of 16
// bytes, and what a tile does not have comes as zeros.
#pragma once

#include <cstdint>

#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// 16 bytes; zeros, without a read, where `exists` is false.
__device__ inline void copy_async(uint32_t to, const uint8_t* from, bool exists) {
  const uint32_t bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `Left` groups of this thread's copies have landed.
template <int Left>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// A thread's part of an operand's tile: the same chunk of every kLineStep-th line.
template <class Layout, int Threads>
class OperandCopies {
  static constexpr bool kTransposed = Layout::kMajor == StageMajor::MN;
  static constexpr int kCount = Layout::kLines * Layout::kChunks / Threads;
  static constexpr int kLineStep = Threads / Layout::kChunks;
  static_assert(Layout::kLines * Layout::kChunks % Threads == 0);
  static_assert(Threads % Layout::kChunks == 0);
  static_assert(kLineStep % 8 == 0, "the permutation is the same in all of a thread's lines");

 public:
  // `from`: the tile's first element; `pitch`: bytes of a row there; `extent`: the tile's rows of A,
  // columns of B, that exist.
  __device__ void start(const uint8_t* from, uint32_t pitch, int32_t extent) {
    from_ = from + uint64_t(line()) * pitch + chunk() * 16;
    extent_ = extent;
  }

  // The next kK of the contraction, of which `left` exist.
  __device__ void copy(uint32_t stage, uint32_t pitch, int32_t left) {
    const int32_t lines = kTransposed ? left : extent_;
    const int32_t across = kTransposed ? extent_ : left;
    const int32_t mine = int32_t(chunk()) * Layout::kChunkElements < across ? lines - line() : 0;
    const uint32_t to = stage + Layout::offset(line(), chunk());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_async(to + i * kLineStep * Layout::kLineBytes,
                 from_ + uint64_t(pitch) * uint32_t(i * kLineStep), i * kLineStep < mine);
    }
    from_ += kTransposed ? uint64_t(pitch) * Layout::kK : Layout::kK * sizeof(uint16_t);
  }

 private:
  __device__ static int32_t line() { return int32_t(threadIdx.x) / Layout::kChunks; }
  __device__ static uint32_t chunk() { return threadIdx.x % Layout::kChunks; }

  const uint8_t* from_;
  int32_t extent_;
};

// Where operands and results of all groups lie.
struct MmaOperands {
  const uint8_t* a;
  const uint8_t* b;
  uint32_t pitch_a, pitch_b;  // bytes of a row
};

// Fills stages, tile after tile. The whole CTA.
template <Gemm kind, class Config, class T>
class CopyRing {
 public:
  __device__ CopyRing(const MmaOperands& in, const Shape& shape, uint32_t stages)
      : in_(in), shape_(shape), stages_(stages) {}

  // From here on stages are filled for `tile`.
  __device__ void enter(const Tile& tile) {
    left_ = tile.group < 0 ? 0 : tile.k;
    if (left_ == 0) return;
    const int64_t token = tile.begin;
    const int32_t columns = (kind == Gemm::fprop ? shape_.n : shape_.k) - tile.column;
    const int64_t matrix = int64_t(tile.group) * shape_.n;  // first row of the group's weight
    if constexpr (kind == Gemm::wgrad) {
      a_.start(in_.a + token * in_.pitch_a + int64_t(tile.row) * 2, in_.pitch_a, tile.rows);
      b_.start(in_.b + token * in_.pitch_b + int64_t(tile.column) * 2, in_.pitch_b, columns);
    } else {
      a_.start(in_.a + (token + tile.row) * in_.pitch_a, in_.pitch_a, tile.rows);
      if constexpr (kind == Gemm::fprop) {
        b_.start(in_.b + (matrix + tile.column) * in_.pitch_b, in_.pitch_b, columns);
      } else {
        b_.start(in_.b + matrix * in_.pitch_b + int64_t(tile.column) * 2, in_.pitch_b, columns);
      }
    }
  }

  // The next stage of the tile, which must have one.
  __device__ void copy() {
    a_.copy(stages_ + at_, in_.pitch_a, left_);
    b_.copy(stages_ + at_ + T::A::kBytes, in_.pitch_b, left_);
    left_ -= Config::tile_k;
    at_ = at_ == (T::kStages - 1) * T::kStageBytes ? 0 : at_ + T::kStageBytes;
    commit_copies();
  }

  // The same, or an empty group where the tile has no stage left.
  __device__ void copy_if_any() {
    if (left_ > 0) {
      copy();
    } else {
      commit_copies();
    }
  }

 private:
  const MmaOperands& in_;
  const Shape& shape_;
  OperandCopies<typename T::A, T::kThreads> a_;
  OperandCopies<typename T::B, T::kThreads> b_;
  int32_t left_ = 0;  // of the contraction
  uint32_t stages_;
  uint32_t at_ = 0;  // the next stage
};

}  // namespace fusegen
