// What softmax and its gradient are launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// y = softmax(scale * x + bias) of each row; what is left out counts as -inf.
struct SoftmaxArguments {
  const void* x;                  // [outer, heads, queries, columns]
  const void* mask = nullptr;     // [outer, queries, columns] bytes, not 0: left out; nullptr: none is
  const void* bias = nullptr;     // [outer, queries, columns]; nullptr: zeros
  void* y;                        // like x
  float scale;
  int64_t outer;
  int64_t heads;
  int64_t queries;
  int64_t columns;                // a multiple of 8
  // Rows of a matrix of which the last one has all columns, and each before it one less than the
  // next; 0: all rows have all.
  int64_t causal_queries = 0;
};

// dx = scale * y * (dy - sum of dy y over the row).
struct SoftmaxGradArguments {
  const void* dy;  // [rows, columns]
  const void* y;   // [rows, columns]
  void* dx;        // [rows, columns]
  float scale;
  int64_t rows;
  int64_t columns;  // a multiple of 8
};

}  // namespace fusegen
