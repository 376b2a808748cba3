// What rotary embeddings are launched with; host side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// By the angles of the tables, or by their negatives.
enum class RotaryDirection { forward, inverse };

// Each pair of a head's elements, rotated by an angle of its row.
struct RotaryArguments {
  const void* x;     // [rows, columns]; heads of 2 * pairs columns one behind the other
  const float* cos;  // [rows, pairs]
  const float* sin;  // [rows, pairs]
  void* y;           // like x
  int64_t rows;
  int64_t columns;   // a multiple of 2 * pairs
  int64_t pairs;     // of a head; a multiple of 8
  bool interleaved;  // pair i is elements 2i and 2i + 1 of a head; otherwise i and i + pairs
  RotaryDirection kind;
};

}  // namespace fusegen
