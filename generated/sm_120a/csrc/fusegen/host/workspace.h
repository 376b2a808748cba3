// Memory that lives inside one call.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

#include "fusegen/host/layout.h"
#include "fusegen/host/stable.h"

namespace fusegen {

// A result's memory before the first step that touches it; none where nobody asked for the result.
inline Region region(const Tensor& result, int before) {
  const int64_t bytes = result.numel() * int64_t(result.element_size());
  return {result.mutable_data_ptr(), bytes, before};
}
inline Region region(const std::optional<Tensor>& result, int before) {
  return result ? region(*result, before) : Region{nullptr, 0, before};
}

// One allocation for all buffers of a call that lie in no result's region. Its steps run one after the
// other: a kernel that is launched early touches no memory before its predecessor has ended.
template <size_t Count, size_t Results = 0>
class Workspace {
 public:
  Workspace(const std::array<Lifetime, Count>& buffers, const Tensor& like,
            const std::array<Region, Results>& results = {})
      : buffers_(buffers) {
    std::copy(results.begin(), results.end(), regions_.begin());
    regions_.back() = kWorkspace;
    layout_ = lay_out(buffers_, regions_);
    if (layout_.bytes == 0) return;
    memory_ = empty({layout_.bytes}, ScalarType::Byte, like);
    regions_.back().memory = memory_.mutable_data_ptr();
  }

  // Null where the call does not want it: a kernel with several results writes those that have an
  // address.
  void* operator[](size_t index) const {
    const Place place = layout_.places[index];
    void* const memory = regions_[place.region].memory;  // null of no bytes
    if (memory == nullptr || buffers_[index].bytes == kUnwanted) return nullptr;
    return static_cast<char*>(memory) + place.offset;
  }

 private:
  std::array<Lifetime, Count> buffers_;
  std::array<Region, Results + 1> regions_;
  Layout<Count> layout_;
  Tensor memory_;
};

}  // namespace fusegen
