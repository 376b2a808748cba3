// What a kernel is told of the change that its results go through, of the tensor they meet, and of
// the one that has them unchanged.
#pragma once

#include <cuda.h>

#include "fusegen/common/status.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

template <class Change, Store store>
struct Epilogue {
  Change change;

  __device__ void prefetch() const {}
};

template <class Change>
struct Epilogue<Change, Store::binary> {
  Change change;
  CUtensorMap other = {};  // as the result's

  __device__ void prefetch() const { prefetch_descriptor(&other); }
};

template <class Change>
struct Epilogue<Change, Store::unary_aux> {
  Change change;
  CUtensorMap aux = {};  // as the result's
  bool asked = false;    // for aux; it is no descriptor otherwise

  __device__ void prefetch() const {
    if (asked) prefetch_descriptor(&aux);
  }
};

template <class Change>
struct Epilogue<Change, Store::gated> {
  Change change;
  const float* row_values = nullptr;  // [tokens], where the change is of them, too

  __device__ void prefetch() const {}
};

template <class Change>
struct Epilogue<Change, Store::gated_aux> {
  Change change;
  const float* row_values = nullptr;
  CUtensorMap aux[2] = {};  // a half each, lest one is stored where the other one begins
  bool asked = false;

  __device__ void prefetch() const {
    if (!asked) return;
    prefetch_descriptor(&aux[0]);
    prefetch_descriptor(&aux[1]);
  }
};

// Where tiles of `TileN` columns are gated: one half of rows of `row` columns.
template <class Element, int TileN>
Status encode_half(CUtensorMap* map, const void* base, int64_t row) {
  return encode_ragged_part<Element>(map, base, row / 2, row, kChunkRows, kGatedColumns<TileN>,
                                     kGatedSwizzle<TileN>);
}

template <class Element, int TileN, class Change, Store store>
Status encode_gated(const EpilogueArguments& in, int64_t row, Epilogue<Change, store>* out) {
  out->row_values = static_cast<const float*>(in.other);
  if constexpr (has_aux(store)) {
    out->asked = in.aux != nullptr;
    if (!out->asked) return {};
    const Element* const first = static_cast<const Element*>(in.aux);
    Status status = encode_half<Element, TileN>(&out->aux[0], first, row);
    if (!status.ok()) return status;
    return encode_half<Element, TileN>(&out->aux[1], first + row / 2, row);
  } else {
    return {};
  }
}

// Host side. `columns` are those of the GEMM's own result, whose rows are tokens where there is
// another tensor; `TileN` those of a tile, where it is gated.
template <class Element, int TileN = 0, class Change, Store store>
Status encode_epilogue(const EpilogueArguments& in, int64_t columns,
                       Epilogue<Change, store>* out) {
  if constexpr (is_gated(store)) {
    static_assert(TileN > 0, "halves of a tile are stored in parts that fit into them");
    return encode_gated<Element, TileN>(in, columns, out);
  } else if constexpr (store == Store::binary) {
    return encode_ragged<Element>(&out->other, in.other, columns, kChunkRows, kChunkColumns);
  } else if constexpr (has_aux(store)) {
    out->asked = in.aux != nullptr;
    if (!out->asked) return {};
    return encode_ragged<Element>(&out->aux, in.aux, columns, kChunkRows, kChunkColumns);
  } else {
    return {};
  }
}

}  // namespace fusegen
