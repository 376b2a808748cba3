// Scales of both operands that come with a stage, as whole atoms: see quantize/scale_atoms.cuh.
#pragma once


#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/load/ring.sm90.cuh"
#include "fusegen/quantize/scale_atoms.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

// What a kernel is told of them; the first atom of each operand, and how many there are.
struct AtomScales {
  const uint8_t* a;
  const uint8_t* b;
  int32_t atoms;   // along the contraction, of 128 rows of either operand
  int32_t rows_b;  // atoms above each other of one matrix of b
};

// A whole atom into shared memory; `barrier` counts its bytes.
__device__ inline void load_atom(void* to, const uint8_t* from, CopyBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "n"(kAtomBytes), "r"(shared_address(&barrier))
      : "memory");
}

// Loads those of a stage. In the place of atoms that a tile has not comes the last one that it has:
// nothing is multiplied by them, or nothing of it is stored.
template <Gemm kind, class T>
struct AtomLoader {
  static constexpr int kBytes = T::kScaleBytes;
  static constexpr int kDepth = kAtomBlocks * T::kScaleBlock;  // of an atom, in elements

  AtomScales scales;

  __device__ void prefetch() const {}

  __device__ void load(CopyBarrier& full, uint8_t* to, const Tile& tile, int32_t k) const {
    const int32_t last = int32_t(blocks(tile.k - k, kDepth)) - 1;
    const uint8_t* const from_a = scales.a + place(row_of_a(tile), tile, k);
#pragma unroll
    for (int atom = 0; atom < T::kAtoms; ++atom) {
      const int32_t along = min(atom, last) * kAtomBytes;
      load_atom(to + atom * kAtomBytes, from_a + along, full);
#pragma unroll
      for (int i = 0; i < T::kAtomsOfB; ++i) {
        const int slot = T::kAtoms + atom * T::kAtomsOfB + i;
        load_atom(to + slot * kAtomBytes, scales.b + place(row_of_b(tile, i), tile, k) + along, full);
      }
    }
  }

 private:
  // A group's tokens begin an atom.
  __device__ static int32_t first_of_group(const Tile& tile) {
    return tile.begin / kAtomRows + tile.group;
  }
  __device__ static int32_t row_of_a(const Tile& tile) {
    return tile.row / kAtomRows + (kind == Gemm::wgrad ? 0 : first_of_group(tile));
  }
  __device__ int32_t row_of_b(const Tile& tile, int32_t index) const {
    const int32_t row = min(tile.column / kAtomRows + index, scales.rows_b - 1);
    return row + (kind == Gemm::wgrad ? 0 : tile.group * scales.rows_b);
  }
  // Of the atom of 128 rows that element `k` of a tile's contraction is of, in bytes.
  __device__ int64_t place(int32_t row, const Tile& tile, int32_t k) const {
    const int32_t first = kind == Gemm::wgrad ? first_of_group(tile) * (kAtomRows / kDepth) : 0;
    return (int64_t(row) * scales.atoms + first + k / kDepth) * kAtomBytes;
  }
};

// Where boxes of codes of `bits` lie, in bytes along the contraction: along tokens those of
// transposed copies whose groups begin an atom.
template <Gemm kind, int bits>
struct ScaledCoordinates {
  static constexpr bool kAlongTokens = kind == Gemm::wgrad;
  static constexpr int kRankA = 2;
  static constexpr int kRankB = kAlongTokens ? 2 : 3;

  __device__ static BoxCoordinates a(const Tile& tile, int32_t row, int32_t k) {
    return {at(tile, k), kAlongTokens ? row : tile.begin + row, 0, 0};
  }

  __device__ static BoxCoordinates b(const Tile& tile, int32_t column, int32_t k) {
    return {at(tile, k), column, kAlongTokens ? 0 : tile.group, 0};
  }

 private:
  __device__ static int32_t at(const Tile& tile, int32_t k) {
    const int32_t first = kAlongTokens ? kAtomRows * (tile.begin / kAtomRows + tile.group) : 0;
    return (first + k) / (8 / bits);
  }
};

}  // namespace fusegen
