// What a kernel is told of the change that its results go through, and of the tensor they meet.
#pragma once

#include <cuda.h>

#include "fusegen/common/status.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/load/ragged.sm90.cuh"
#include "fusegen/load/tma.sm90.cuh"
#include "fusegen/sink/chunk.sm90.cuh"

namespace fusegen {

template <class Change, bool Loads = Change::kLoads>
struct Epilogue {
  Change change;

  __device__ void prefetch() const {}
};

template <class Change>
struct Epilogue<Change, true> {
  Change change;
  CUtensorMap other = {};  // as the result's

  __device__ void prefetch() const { prefetch_descriptor(&other); }
};

// Host side. `columns` are those of the result, whose rows are tokens where a tensor is loaded.
template <class Element, class Change>
Status encode_epilogue(const EpilogueArguments& in, int64_t columns, Epilogue<Change>* out) {
  if constexpr (Change::kLoads) {
    return encode_ragged<Element>(&out->other, in.other, columns, kChunkRows, kChunkColumns);
  } else {
    return {};
  }
}

}  // namespace fusegen
