// What statistics of a quantised copy are launched with; host side, no device code.
#pragma once

#include "fusegen/quantize/quantize.h"

namespace fusegen {

// The tensor is that of QuantizeArguments, the copy is laid out as a QuantizedCopy.
struct StatisticsArguments {
  const void* input;
  const int64_t* group_sizes;  // [groups] on the device
  int64_t rows;
  int64_t columns;  // a multiple of 8
  int64_t groups;
  const void* data;
  const void* scale;
  const float* amax = nullptr;  // nv: [groups]
  int64_t pitch;
  int64_t row_align = 32;
  int64_t token_pitch = 0;
  void* partials;  // workspace of 48 bytes for each block
  int64_t blocks;  // of threads; the same number for the same order of sums
  float* output;   // [5]: amax, non-zero elements, underflow, saturation, relative error
};

}  // namespace fusegen
