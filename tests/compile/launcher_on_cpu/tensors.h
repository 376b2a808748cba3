// Tensors of a caller in C, and what a launcher gives it back.
#pragma once

#include <cstring>

#include "fusegen/host/stable.h"

namespace fusegen {

struct Given {
  void* memory;
  int64_t rank;
  int64_t sizes[2];
  int64_t dtype;
};

inline Tensor taken(const Given& given) {
  return {given.memory, {given.sizes, given.sizes + given.rank}, ScalarType(given.dtype)};
}

inline void give(const Tensor& result, Given* to) {
  to->rank = result.dim();
  for (int64_t axis = 0; axis < result.dim(); ++axis) to->sizes[axis] = result.size(axis);
  const size_t bytes = size_t(result.numel()) * result.element_size();
  std::memcpy(to->memory, result.const_data_ptr(), bytes);
}
inline void give(const std::optional<Tensor>& result, Given* to) {
  if (result) give(*result, to);
}
template <class... Results, size_t... indices>
void give_all(const std::tuple<Results...>& results, Given* to, std::index_sequence<indices...>) {
  (give(std::get<indices>(results), to + indices), ...);
}
template <class... Results>
void give(const std::tuple<Results...>& results, Given* to) {
  give_all(results, to, std::index_sequence_for<Results...>());
}

}  // namespace fusegen
