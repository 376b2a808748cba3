// What rows are divided by; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// The root of the mean square, the standard deviation about the mean, or the length.
enum class NormKind { rms, layer, l2 };

inline constexpr int64_t kMostNormColumns = 65536;

}  // namespace fusegen
