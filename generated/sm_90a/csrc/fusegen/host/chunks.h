// Rows of tensors in a loop over chunks of them.
#pragma once

#include <cstdint>

namespace fusegen {

inline constexpr int64_t min(int64_t value, int64_t most) { return value < most ? value : most; }

// So many bytes behind an address; null where there is none.
inline const void* behind(const void* address, int64_t bytes) {
  return address == nullptr ? nullptr : static_cast<const char*>(address) + bytes;
}
inline void* behind(void* address, int64_t bytes) {
  return address == nullptr ? nullptr : static_cast<char*>(address) + bytes;
}

}  // namespace fusegen
