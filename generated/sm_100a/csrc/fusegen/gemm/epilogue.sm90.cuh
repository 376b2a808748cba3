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

// Host side. `columns` are those of the result, whose rows are tokens where there is another tensor.
template <class Element, class Change, Store store>
Status encode_epilogue(const EpilogueArguments& in, int64_t columns,
                       Epilogue<Change, store>* out) {
  if constexpr (store == Store::binary) {
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
