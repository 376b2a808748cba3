// Packed rows as heads of queries, of keys and of values.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/rotary/heads.cuh"

namespace fusegen::rotary {

// Of either direction's arguments.
template <class Arguments>
inline Status check_qkv(const Arguments& in) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.queries_per_key < 1) return {kInvalid, "queries_per_key: at least 1"};
  const Status status = check_sizes(in.rows, in.columns, in.pairs);
  if (!status.ok()) return status;
  if (in.key_values % (2 * in.pairs) != 0) return {kInvalid, "key_values: a multiple of a head's"};
  if (in.columns != (in.queries_per_key + 2) * in.key_values) {
    return {kInvalid, "columns: those of queries, of keys and of values"};
  }
  return {};
}

// Where the heads of queries, of keys and of values lie, of either direction's arguments.
template <class Vector, class Arguments>
static QueriesKeysValues<Vector> parts_of(const Arguments& in) {
  const int64_t heads = in.key_values / (2 * in.pairs);
  return {static_cast<Vector*>(in.queries), static_cast<Vector*>(in.keys),
          static_cast<Vector*>(in.values), in.queries_per_key * heads, heads};
}

// From packed rows to their parts, or back, of sizes that were checked.
template <class Element, class Arguments, class From, class To>
static Status launch_qkv(const char* call, const Arguments& in, From from, To to,
                         RotaryDirection direction, Stream& stream) {
  const int64_t heads = in.columns / (2 * in.pairs);
  const Rotation<From, To> rotation{
      from, to, {in.cos, in.sin, direction}, in.rows, heads, in.pairs};
  return launch_rotation<Element>(call, rotation, in.interleaved, stream);
}

}  // namespace fusegen::rotary
