// What the cross entropy of logits with targets, and its gradient, are launched with; host side, no
// device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// loss = lse - (1 - label_smoothing) x[target] - label_smoothing (mean of x) + z_loss lse^2, where lse
// is the logarithm of the sum of a row's exponentials. Both are 0 where the target is ignored; the
// loss is NaN where it is no column otherwise.
struct CrossEntropyArguments {
  const void* x;           // [rows, columns]
  const int64_t* targets;  // [rows]
  float* loss;             // [rows]
  float* lse;              // [rows]; nullptr: not wanted
  float label_smoothing;
  float z_loss;
  int64_t ignore_index;
  int64_t rows;
  int64_t columns;  // a multiple of 8
};

// dx = dloss ((1 + 2 z_loss lse) exp(x - lse) - label_smoothing / columns), less
// dloss (1 - label_smoothing) in the target's column.
struct CrossEntropyGradArguments {
  const float* dloss;      // [rows]
  const void* x;           // [rows, columns]
  const int64_t* targets;  // [rows]
  const float* lse;        // [rows]
  void* dx;                // [rows, columns]; may be x
  float label_smoothing;
  float z_loss;
  int64_t ignore_index;
  int64_t rows;
  int64_t columns;  // a multiple of 8
};

}  // namespace fusegen
