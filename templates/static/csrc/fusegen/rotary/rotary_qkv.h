// What rotary embeddings between packed rows and queries, keys and values are launched with; host
// side, no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Packed rows to queries and keys, whose pairs are rotated, and to values, which are copied.
struct RotaryQkvArguments {
  const void* x;     // [rows, columns]: heads of queries, of keys, of values, one behind the other
  const float* cos;  // [rows, pairs]
  const float* sin;  // [rows, pairs]
  void* queries;     // [rows, queries_per_key * key_values]
  void* keys;        // [rows, key_values]
  void* values;      // like keys
  int64_t rows;
  int64_t columns;          // (queries_per_key + 2) * key_values
  int64_t key_values;       // a multiple of 2 * pairs
  int64_t pairs;            // of a head; a multiple of 8
  int64_t queries_per_key;  // heads of queries for each head of keys; at least 1
  bool interleaved;         // pair i is elements 2i and 2i + 1 of a head; otherwise i and i + pairs
};

// Gradients of queries and keys, rotated back, and those of values, to packed rows.
struct RotaryQkvGradArguments {
  const void* queries;  // [rows, queries_per_key * key_values]
  const void* keys;     // [rows, key_values]
  const void* values;   // like keys
  const float* cos;     // [rows, pairs]
  const float* sin;     // [rows, pairs]
  void* dx;             // [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t key_values;
  int64_t pairs;
  int64_t queries_per_key;
  bool interleaved;
};

}  // namespace fusegen
