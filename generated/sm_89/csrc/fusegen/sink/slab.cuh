// Shared memory of one warp, through which results become rows.
//
// Lanes hold pairs of a column block's rows; memory wants whole rows. A warp puts 16 rows of 128
// bytes into its own slab, permuted so that neither side meets in a bank, and every lane takes 16
// bytes at a time.
#pragma once

#include <cstdint>

namespace fusegen {

inline constexpr int kSlabBytes = 16 * 128;

// Of results of `Bytes` each.
template <int Bytes>
struct Slab {
  static constexpr int kUnit = 16 / Bytes;  // results that a lane takes at once

  uint8_t* bytes;

  // Where a result is, and what of its 16 bytes follows. Eight rows' writes of 4 bytes a lane, or
  // four rows' of 8, lie in all banks.
  __device__ uint8_t* at(uint32_t row, uint32_t column) const {
    const uint32_t permutation = Bytes == 4 ? row % 4 * 2 : row % 8;
    const uint32_t unit = column / kUnit ^ permutation;
    return bytes + row * 128 + unit * 16 + column % kUnit * Bytes;
  }

  __device__ uint4 unit(uint32_t row, uint32_t column) const {
    return *reinterpret_cast<const uint4*>(at(row, column));
  }
};

}  // namespace fusegen
