// Ranges that Nsight and other tools show around the steps of a launcher.
//
// NVTX is headers only: it looks for a tool when its first range begins, and without one a range
// costs a test of a pointer.
#pragma once

#if !__has_include(<nvtx3/nvToolsExt.h>)
#error "ranges need NVTX's headers, which this CUDA toolkit lacks: one from pip has them with its extra nvtx"
#endif
#include <nvtx3/nvToolsExt.h>

namespace fusegen {

// Open from here to the end of the block, also where that is left by an exception.
class Range {
 public:
  explicit Range(const char* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace fusegen
