// layout.h as a C function, for test_layout.py.
#pragma once

#include "fusegen/layout.h"

namespace {

constexpr int kMost = 12;

}  // namespace

// Buffers that the caller has not are unwanted. Returns the bytes of all.
extern "C" int64_t lay_out_buffers(const int64_t* bytes, const int* first, const int* last,
                                   int64_t* offsets) {
  std::array<fusegen::Lifetime, kMost> buffers;
  for (int i = 0; i < kMost; ++i) buffers[i] = {bytes[i], first[i], last[i]};
  const fusegen::Layout<kMost> layout = fusegen::lay_out(buffers);
  for (int i = 0; i < kMost; ++i) offsets[i] = layout.offsets[i];
  return layout.bytes;
}
