// Operands from global memory into a ring of stages by cp.async: every thread copies chunks of 16
// bytes, and what a tile does not have comes as zeros.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/gemm/config.mma.cuh"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/load/async.mma.cuh"
#include "fusegen/load/stage.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// A thread's part of an operand's tile: the same chunk of every kLineStep-th line. `Lines` says which
// ones those are in memory.
template <class Layout, int Threads, bool WholeChunks, class Lines = EveryLine>
class OperandCopies {
  static constexpr bool kTransposed = Layout::kMajor == StageMajor::MN;
  static constexpr int kCount = Layout::kLines * Layout::kChunks / Threads;
  static constexpr int kLineStep = Threads / Layout::kChunks;
  // Rows of 16 bits end with a chunk, and so may others; else the last stage of a row is copied in a
  // loop, because copies of less than a chunk take registers.
  static constexpr bool kWhole = WholeChunks || Layout::kChunkElements == kRowAlignment;
  static_assert(Layout::kLines * Layout::kChunks % Threads == 0);
  static_assert(Threads % Layout::kChunks == 0);
  static_assert(kLineStep % 8 == 0, "the permutation is the same in all of a thread's lines");
  static_assert(Lines::adds(kLineStep) && (Lines::kHalves == 1 || !kTransposed));

 public:
  // `from`: the tile's first element; `pitch`: bytes of a row there; `extent`: the tile's rows of A,
  // columns of B, that exist, of a half where there are two, which are `apart` bytes from each other.
  __device__ void start(const uint8_t* from, uint32_t pitch, int32_t extent, uint64_t apart = 0) {
    from_ = from + uint64_t(Lines::line(line())) * pitch + chunk() * 16;
    if (Lines::is_second(line())) from_ += apart;
    extent_ = extent;
  }

  // The next stage of the contraction, of which `left` elements exist.
  __device__ void copy(uint32_t stage, uint32_t pitch, int32_t left, uint64_t apart = 0) {
    const int32_t lines = kTransposed ? left : extent_;
    const int32_t across = kTransposed ? extent_ : left;
    const int32_t elements = across - int32_t(chunk()) * Layout::kChunkElements;
    const int32_t mine = elements > 0 ? lines - Lines::line(line()) : 0;
    const uint32_t to = stage + Layout::offset(line(), chunk());
    if (kWhole || left >= Layout::kChunks * Layout::kChunkElements) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) copy_chunk(to, pitch, i, mine, 16, apart);
    } else {
      const uint32_t bytes = (min(elements, Layout::kChunkElements) * Layout::kBits + 7) / 8;
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) copy_chunk(to, pitch, i, mine, bytes, apart);
    }
    from_ += kTransposed ? uint64_t(pitch) * Layout::kLines : Layout::kLineBytes;
  }

 private:
  __device__ static int32_t line() { return int32_t(threadIdx.x) / Layout::kChunks; }
  __device__ static uint32_t chunk() { return threadIdx.x % Layout::kChunks; }

  // Of the i-th of its lines, if that is one of `mine`, the first `bytes`.
  __device__ void copy_chunk(uint32_t to, uint32_t pitch, int i, int32_t mine, uint32_t bytes,
                             uint64_t apart) {
    const int32_t line = Lines::line(i * kLineStep);
    const uint64_t half = Lines::is_second(i * kLineStep) ? apart : 0;
    copy_async(to + i * kLineStep * Layout::kLineBytes,
               from_ + uint64_t(pitch) * uint32_t(line) + half, line < mine ? bytes : 0);
  }

  const uint8_t* from_;
  int32_t extent_;
};

// Fills stages, tile after tile. The whole CTA.
template <Gemm kind, class Config, class T>
class CopyRing {
 public:
  __device__ CopyRing(const typename T::Operands& in, const Shape& shape, uint32_t stages)
      : in_(in), shape_(shape), stages_(stages) {}

  // From here on stages are filled for `tile`.
  __device__ void enter(const Tile& tile) {
    left_ = tile.group < 0 ? 0 : tile.k;
    if (left_ == 0) return;
    const int32_t columns = (kind == Gemm::fprop ? shape_.n : shape_.k) - tile.column;
    a_.start(T::Addresses::a(in_, tile, shape_), in_.pitch_a, tile.rows);
    b_.start(T::Addresses::b(in_, tile, shape_), in_.pitch_b, columns / T::LinesOfB::kHalves,
             halves_apart());
    scales_.start(in_, tile, shape_);
  }

  // The next stage of the tile, which must have one.
  __device__ void copy() {
    a_.copy(stages_ + at_, in_.pitch_a, left_);
    b_.copy(stages_ + at_ + T::A::kBytes, in_.pitch_b, left_, halves_apart());
    scales_.copy(stages_ + at_ + T::kScalesAt, left_);
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
  static constexpr bool kWholeChunks = T::Addresses::kWholeChunks;

  __device__ uint64_t halves_apart() const { return uint64_t(shape_.n / 2) * in_.pitch_b; }

  const typename T::Operands& in_;
  const Shape& shape_;
  OperandCopies<typename T::A, T::kThreads, kWholeChunks> a_;
  OperandCopies<typename T::B, T::kThreads, kWholeChunks, typename T::LinesOfB> b_;
  typename T::Scales::template Copies<kind, T> scales_;
  int32_t left_ = 0;  // of the contraction
  uint32_t stages_;
  uint32_t at_ = 0;  // the next stage
};

}  // namespace fusegen
