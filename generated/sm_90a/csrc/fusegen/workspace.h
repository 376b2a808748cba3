// Memory that lives inside one call.
#pragma once

#include <array>
#include <cstddef>

#include "layout.h"
#include "stable.h"

namespace fusegen {

// One allocation for all buffers of a call. Its steps run one after the other: a kernel that is
// launched early touches no memory before its predecessor has ended.
template <size_t Count>
class Workspace {
 public:
  Workspace(const std::array<Lifetime, Count>& buffers, const Tensor& like)
      : buffers_(buffers), layout_(lay_out(buffers)) {
    if (layout_.bytes == 0) return;
    memory_ = empty({layout_.bytes}, ScalarType::Byte, like);
    base_ = static_cast<char*>(memory_.mutable_data_ptr());
  }

  // Null where the call does not want it: a kernel with several results writes those that have an
  // address.
  void* operator[](size_t index) const {
    if (base_ == nullptr || buffers_[index].bytes == kUnwanted) return nullptr;
    return base_ + layout_.offsets[index];
  }

 private:
  std::array<Lifetime, Count> buffers_;
  Layout<Count> layout_;
  Tensor memory_;
  char* base_ = nullptr;  // of no bytes
};

}  // namespace fusegen
