// Where scales lie that block-scaled matrix instructions read: in atoms of 128 rows by 4 blocks.
//
// A row's four scales are one word of its atom, and neighbouring rows of a warp's MMA are 16 bytes
// apart (PTX ISA, "Layout of scale factors"; CuTe's Sm1xxBlockScaledConfig says the same). Atoms of
// 128 rows follow each other along the contraction. Groups of tokens begin with an atom of their own:
// as rows at begin / 128 + group, along a contraction at as many tokens, in blocks. Whatever is in no
// block is 0, because 0 times what no number stands for would spoil a sum. Compiles for the host too.
#pragma once

#include <stdint.h>

#include "fusegen/quantize/places.cuh"

#ifdef __CUDACC__
#define FUSEGEN_INLINE __host__ __device__ __forceinline__
#else
#define FUSEGEN_INLINE inline
#endif

namespace fusegen {

inline constexpr int kAtomRows = 128, kAtomBlocks = 4, kAtomBytes = kAtomRows * kAtomBlocks;
inline constexpr int kAtomRowBytes = 16;  // from a row to the next one, of the same 32

// The word of a row in its atom.
FUSEGEN_INLINE uint32_t atom_word(uint32_t row) { return row % 32 * kAtomRowBytes + row / 32 * kAtomBlocks; }

// The byte of a row and a block, where 128 rows have `atoms`.
FUSEGEN_INLINE int64_t atom_place(int64_t row, int64_t block, int64_t atoms) {
  const int64_t atom = row / kAtomRows * atoms + block / kAtomBlocks;
  return atom * kAtomBytes + atom_word(uint32_t(row % kAtomRows)) + block % kAtomBlocks;
}

// The space that atoms lie in; matrices have as many rows as they have.
inline constexpr Space kAtomSpace{kAtomRows, 0};

// Atoms above each other of all groups, where their rows are those of atoms.
FUSEGEN_INLINE int32_t atom_row_blocks(const RowGroups& groups) {
  if (groups.ragged()) return ragged_extent(groups, kAtomSpace) / kAtomRows;
  return groups.groups * int32_t((uint32_t(groups.rows) + kAtomRows - 1) / kAtomRows);
}

// Atoms beside each other along `length` elements, of which `block` share a byte.
FUSEGEN_INLINE int32_t atoms_along(int32_t length, int32_t block) {
  return int32_t((uint32_t(length) + uint32_t(kAtomBlocks * block) - 1) / uint32_t(kAtomBlocks * block));
}

// The same along the rows of groups, or of one matrix.
FUSEGEN_INLINE int32_t atoms_along_rows(const RowGroups& groups, int32_t block) {
  return atoms_along(groups.ragged() ? ragged_extent(groups, kAtomSpace) : groups.rows, block);
}

}  // namespace fusegen

#undef FUSEGEN_INLINE
