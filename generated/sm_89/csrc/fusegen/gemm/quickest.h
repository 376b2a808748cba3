// Which configuration of a GEMM takes the least time, by estimates of waves of tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "fusegen/common/ceil_div.h"
#include "fusegen/gemm/gemm.h"

namespace fusegen {

// What SMs make of a result at a time, and nanoseconds: of a launch, of each wave, and of each wave
// per 1024 of K.
struct WaveTime {
  int64_t rows, columns;  // of a cluster's tiles
  int64_t sms, clusters;  // SMs that hold so many clusters at once
  int64_t launch, wave, k;
};

inline int64_t estimate(const GemmSizes& sizes, const WaveTime& time) {
  const int64_t tiles = ceil_div(sizes.rows, time.rows) * ceil_div(sizes.columns, time.columns);
  const int64_t at_once = std::max<int64_t>(1, sizes.sms / time.sms * time.clusters);
  return time.launch + ceil_div(tiles, at_once) * (time.wave + sizes.k * time.k / 1024);
}

// Index of the least; the first of several.
inline int quickest(const GemmSizes& sizes, std::initializer_list<WaveTime> times) {
  const auto less = [&](const WaveTime& a, const WaveTime& b) {
    return estimate(sizes, a) < estimate(sizes, b);
  };
  return static_cast<int>(std::min_element(times.begin(), times.end(), less) - times.begin());
}

}  // namespace fusegen
