// Where the buffers of one call lie: those that are never needed at the same step share memory, with
// each other and with results that are written later.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
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

// Memory that buffers may use before a step: a result's, until that one writes the result.
struct Region {
  void* memory;
  int64_t bytes;
  int before;

  bool holds(const Lifetime& buffer, int64_t offset) const {
    return buffer.last < before && buffer.bytes <= bytes - offset;
  }
};

// The last region of a call. No step ends it, and it is as large as the buffers in it need.
inline constexpr Region kWorkspace{nullptr, std::numeric_limits<int64_t>::max(),
                                   std::numeric_limits<int>::max()};

struct Place {
  size_t region;
  int64_t offset;
};

template <size_t Count>
struct Layout {
  std::array<Place, Count> places;
  int64_t bytes = 0;  // of the workspace
};

struct Placed {
  Lifetime buffer;
  Place place;
};

// The lowest offset in a region that is free for a buffer's life, as far as buffers are placed.
inline int64_t lowest_offset(const Placed* begin, const Placed* end, const Lifetime& buffer,
                             size_t region) {
  int64_t offset = 0;
  for (const Placed* other = begin; other != end;) {
    const int64_t start = other->place.offset, stop = start + other->buffer.bytes;
    const bool clash = other->place.region == region && buffer.meets(other->buffer) &&
                       offset < stop && start < offset + buffer.bytes;
    if (clash) offset = stop;
    other = clash ? begin : other + 1;  // it may now lie on one that it passed
  }
  return offset;
}

// In the first region that holds a buffer; the last one always does.
inline Place first_place(const Placed* begin, const Placed* end, const Lifetime& buffer,
                         const Region* regions) {
  for (size_t region = 0;; ++region) {
    if (!regions[region].holds(buffer, 0)) continue;  // not even alone
    const int64_t offset = lowest_offset(begin, end, buffer, region);
    if (regions[region].holds(buffer, offset)) return {region, offset};
  }
}

// The largest first, each in the first region that holds it, at the lowest offset there ("greedy by
// size", Pisarchyk and Lee, arXiv:2001.03288). Sizes are known to the call alone, so this runs in it:
// about a microsecond for thirty buffers. The last region is the workspace.
template <size_t Count, size_t Regions>
Layout<Count> lay_out(const std::array<Lifetime, Count>& buffers,
                      const std::array<Region, Regions>& regions) {
  constexpr size_t kLast = Regions - 1;
  std::array<size_t, Count> order;
  std::iota(order.begin(), order.end(), size_t(0));
  // Equals in their own order, for which std::stable_sort would take memory from the heap.
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return buffers[a].bytes != buffers[b].bytes ? buffers[a].bytes > buffers[b].bytes : a < b;
  });
  Layout<Count> layout;
  layout.places.fill({kLast, 0});
  std::array<Placed, Count> placed;
  for (size_t rank = 0; rank < Count && buffers[order[rank]].bytes > 0; ++rank) {
    const Lifetime& buffer = buffers[order[rank]];
    const Place place = first_place(placed.data(), placed.data() + rank, buffer, regions.data());
    placed[rank] = {buffer, place};
    layout.places[order[rank]] = place;
    if (place.region == kLast) layout.bytes = std::max(layout.bytes, place.offset + buffer.bytes);
  }
  return layout;
}

}  // namespace fusegen
