// How an operand's tile lies in a stage of shared memory, as rows of 16-byte chunks that are
// permuted so that neither cp.async's writes nor ldmatrix's reads meet in a bank.
#pragma once

#include <cstdint>

namespace fusegen {

inline constexpr int kChunkBits = 128;

// K: K is contiguous in memory. MN: rows (of A) or columns (of B) are.
enum class StageMajor { K, MN };

// `Extent` rows or columns by `K`, of `Bits` each.
template <StageMajor major, int Extent, int K, int Bits>
struct StageLayout {
  static constexpr StageMajor kMajor = major;
  static constexpr int kBits = Bits;
  static constexpr int kChunkElements = kChunkBits / Bits;
  static constexpr int kLines = major == StageMajor::K ? Extent : K;
  static constexpr int kChunks = (major == StageMajor::K ? K : Extent) / kChunkElements;
  static constexpr int kLineBytes = kChunks * 16;
  static constexpr int kBytes = kLines * kLineBytes;
  static_assert(kChunks == 4 || kChunks % 8 == 0, "the permutation below");

  // Byte offset of a chunk. Eight lines' same chunk, and eight neighbouring chunks of a line or of
  // two short ones, lie in all banks.
  __device__ static uint32_t offset(uint32_t line, uint32_t chunk) {
    const uint32_t permutation = kChunks == 4 ? line / 2 % 4 : line % 8;
    return line * kLineBytes + (chunk ^ permutation) * 16;
  }
};

}  // namespace fusegen
