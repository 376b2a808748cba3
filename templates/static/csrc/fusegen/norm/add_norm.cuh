// Norms of sums of two tensors: the norm's kernel with rows that are added, and stored, as they come.
#pragma once

#include "fusegen/norm/add_norm.h"
#include "fusegen/norm/norm.cuh"

namespace fusegen {

namespace norm {

template <class Element>
struct AddRows {
  static constexpr int kBatch = 4;  // vectors of each tensor under way: registers for no more

  const void *x, *add;
  Element* total;  // nullptr: not wanted

  template <class S>
  __device__ __forceinline__ void load(uint4 (&row)[S::kVectors], int64_t begin, int columns,
                                       bool there, const Place<S>& place) const {
    constexpr int kCount = S::kVectors < kBatch ? S::kVectors : kBatch;
    static_assert(S::kVectors % kCount == 0);
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) row[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int first = 0; first < S::kVectors; first += kCount) {
      // A branch for each batch: loads do not move across it.
      if (there && place.column(first) < columns) {
        load_batch<S, kCount>(&row[first], begin, columns, place, first);
      }
    }
  }

 private:
  template <class S, int count>
  __device__ __forceinline__ void load_batch(uint4* row, int64_t begin, int columns,
                                             const Place<S>& place, int first) const {
    uint4 added[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int column = place.column(first + i);
      if (column >= columns) continue;
      row[i] = load_vector<Element>(x, begin + column);
      added[i] = load_vector<Element>(add, begin + column);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int column = place.column(first + i);
      if (column >= columns) continue;
      row[i] = plus<Element>(row[i], added[i]);
      if (total != nullptr) *reinterpret_cast<uint4*>(total + begin + column) = row[i];
    }
  }
};

}  // namespace norm

template <class Element>
static Status launch_add_norm(const AddNormArguments& in, Stream& stream) {
  const norm::AddRows<Element> source{in.norm.x, in.add, static_cast<Element*>(in.total)};
  const norm::StoreRows<Element> sink{static_cast<Element*>(in.norm.y), in.norm.columns};
  return norm::launch<Element>("cudaLaunchKernelEx(add_norm)", in.norm, source, sink, stream);
}

}  // namespace fusegen
