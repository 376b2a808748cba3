// As much of `stable.h` as launchers use, without PyTorch: tensors are memory with sizes, all of them
// on the device 0 of whatever capability a launcher asks for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fusegen/common/status.h"

namespace fusegen {

enum class ScalarType { Byte, Long, Half, BFloat16, Float };
using Sizes = std::initializer_list<int64_t>;
enum class Reach { none, minor, later };
struct Arch {
  const char* name;
  int major;
  int minor;
  Reach reach;
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* memory, std::vector<int64_t> sizes, ScalarType dtype)
      : memory_(memory), sizes_(std::move(sizes)), dtype_(dtype) {}
  Tensor(std::vector<int64_t> sizes, ScalarType dtype)
      : sizes_(std::move(sizes)), dtype_(dtype), own_(new char[size_t(numel()) * element_size() + 1]) {
    memory_ = own_.get();
  }
  int64_t dim() const { return int64_t(sizes_.size()); }
  int64_t size(int64_t axis) const { return sizes_[size_t(axis)]; }
  int64_t stride(int64_t axis) const {
    int64_t stride = 1;
    while (++axis < dim()) stride *= size(axis);
    return stride;
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes_) count *= size;
    return count;
  }
  size_t element_size() const {
    switch (dtype_) {
      case ScalarType::Byte: return 1;
      case ScalarType::Long: return 8;
      case ScalarType::Float: return 4;
      default: return 2;
    }
  }
  ScalarType scalar_type() const { return dtype_; }
  const void* const_data_ptr() const { return memory_; }
  void* mutable_data_ptr() const { return memory_; }
  bool is_contiguous() const { return true; }
  bool is_cuda() const { return true; }
  int32_t get_device_index() const { return 0; }

 private:
  void* memory_ = nullptr;
  std::vector<int64_t> sizes_;
  ScalarType dtype_ = ScalarType::Byte;
  std::shared_ptr<char[]> own_;
};

[[noreturn]] inline void fail(const std::string& cell, const std::string& what) {
  throw std::runtime_error(cell + ": " + what);
}
[[noreturn]] inline void refuse(const char* cell, const char* tensor, const std::string& expected,
                                const std::string& got) {
  fail(cell, std::string(tensor) + ": expected " + expected + ", got " + got);
}
inline void check(const char* cell, const Status& status) {
  if (!status.ok()) fail(cell, status.call);
}

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
inline void use_context(const char*, int32_t) {}
inline cudaStream_t current_stream(const char*, int32_t) { return nullptr; }
inline int sm_count(const char*, int32_t) { return 1; }
inline int32_t require_arch(const char*, const char*, const Tensor&, const Arch&) { return 0; }
inline std::string dtype_name(ScalarType dtype) { return std::to_string(int(dtype)); }

inline Tensor empty(const int64_t* sizes, size_t rank, ScalarType dtype, const Tensor&) {
  return Tensor({sizes, sizes + rank}, dtype);
}
inline Tensor empty(Sizes sizes, ScalarType dtype, const Tensor&) { return Tensor(sizes, dtype); }
inline Tensor dense(const Tensor& tensor) { return tensor; }
inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) { return tensor; }

struct Library {
  void impl(const char*, int) {}
};

}  // namespace fusegen

#define STABLE_TORCH_LIBRARY_IMPL(name, key, library) \
  [[maybe_unused]] static void registered(fusegen::Library& library)
#define TORCH_BOX(function) 0
