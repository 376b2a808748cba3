// layout.h as a C function, for test_layout.py.
#pragma once

#include "fusegen/host/layout.h"

namespace {

constexpr int kMost = 12;
constexpr int kMostRegions = 3;

}  // namespace

// Buffers that the caller has not are unwanted, and regions that it has not have no bytes. Returns the
// bytes of the workspace, which is the region after theirs.
extern "C" int64_t lay_out_buffers(const int64_t* bytes, const int* first, const int* last,
                                   const int64_t* region_bytes, const int* before, int64_t* regions,
                                   int64_t* offsets) {
  std::array<fusegen::Lifetime, kMost> buffers;
  for (int i = 0; i < kMost; ++i) buffers[i] = {bytes[i], first[i], last[i]};
  std::array<fusegen::Region, kMostRegions + 1> all;
  for (int i = 0; i < kMostRegions; ++i) all[i] = {nullptr, region_bytes[i], before[i]};
  all.back() = fusegen::kWorkspace;
  const fusegen::Layout<kMost> layout = fusegen::lay_out(buffers, all);
  for (int i = 0; i < kMost; ++i) {
    regions[i] = int64_t(layout.places[i].region);
    offsets[i] = layout.places[i].offset;
  }
  return layout.bytes;
}
