// layout.h as a C function, for test_layout.py.
#pragma once

#include "fusegen/layout.h"

namespace {

constexpr int kMost = 12;
constexpr int kMostRooms = 3;

}  // namespace

// Buffers that the caller has not are unwanted, and rooms that it has not have no bytes. Returns the
// bytes of the workspace, which is the room after theirs.
extern "C" int64_t lay_out_buffers(const int64_t* bytes, const int* first, const int* last,
                                   const int64_t* room_bytes, const int* before, int64_t* rooms,
                                   int64_t* offsets) {
  std::array<fusegen::Lifetime, kMost> buffers;
  for (int i = 0; i < kMost; ++i) buffers[i] = {bytes[i], first[i], last[i]};
  std::array<fusegen::Room, kMostRooms + 1> all;
  for (int i = 0; i < kMostRooms; ++i) all[i] = {nullptr, room_bytes[i], before[i]};
  all.back() = fusegen::kWorkspace;
  const fusegen::Layout<kMost> layout = fusegen::lay_out(buffers, all);
  for (int i = 0; i < kMost; ++i) {
    rooms[i] = int64_t(layout.places[i].room);
    offsets[i] = layout.places[i].offset;
  }
  return layout.bytes;
}
