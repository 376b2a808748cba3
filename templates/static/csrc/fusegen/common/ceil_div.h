// How many pieces of a size cover an extent; host side, no device code.
#pragma once

#include <cstdint>

namespace fusegen {

constexpr int64_t ceil_div(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

}  // namespace fusegen
