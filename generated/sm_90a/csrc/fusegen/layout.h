// Where the buffers of one call lie in its workspace: those that are never needed at the same step
// share memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace fusegen {

inline constexpr int64_t kUnwanted = -1;

// Buffers start at multiples of 256 bytes, as the allocator's own do.
inline constexpr int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// A buffer's bytes, or kUnwanted, and the first and last step that touch it.
struct Lifetime {
  int64_t bytes;
  int first;
  int last;

  bool meets(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

template <size_t Count>
struct Layout {
  std::array<int64_t, Count> offsets{};
  int64_t bytes = 0;
};

// The largest first, each at the lowest offset that is free throughout its life ("greedy by size",
// Pisarchyk and Lee, arXiv:2001.03288). Sizes are known to the call alone, so this runs in it: about a
// microsecond for thirty buffers.
template <size_t Count>
Layout<Count> lay_out(const std::array<Lifetime, Count>& buffers) {
  std::array<size_t, Count> order;
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return buffers[a].bytes > buffers[b].bytes; });
  Layout<Count> layout;
  for (size_t rank = 0; rank < Count && buffers[order[rank]].bytes > 0; ++rank) {
    const Lifetime& buffer = buffers[order[rank]];
    int64_t offset = 0;
    for (size_t placed = 0; placed < rank;) {
      const Lifetime& other = buffers[order[placed]];
      const int64_t begin = layout.offsets[order[placed]];
      const bool clash = buffer.meets(other) && offset < begin + other.bytes &&
                         begin < offset + buffer.bytes;
      if (clash) offset = begin + other.bytes;
      placed = clash ? 0 : placed + 1;  // it may now lie on one that it passed
    }
    layout.offsets[order[rank]] = offset;
    layout.bytes = std::max(layout.bytes, offset + buffer.bytes);
  }
  return layout;
}

}  // namespace fusegen
