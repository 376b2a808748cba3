// What dropout and its gradient are launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// y = x / (1 - p) where an element is kept, 0 elsewhere.
struct DropoutArguments {
  const void* x;          // [rows, columns]
  const int64_t* random;  // [seed, offset] on the device
  void* y;                // [rows, columns]
  void* mask;             // [rows, columns / 8] bytes; bit i of a byte is of its element i, 1: kept
  float p;                // of being zeroed
  int64_t rows;
  int64_t columns;        // a multiple of 8
};

// dx = dy / (1 - p) where an element was kept, 0 elsewhere.
struct DropoutGradArguments {
  const void* dy;    // [rows, columns]
  const void* mask;  // [rows, columns / 8] bytes
  void* dx;          // [rows, columns]
  float p;
  int64_t rows;
  int64_t columns;   // a multiple of 8
};

}  // namespace fusegen
