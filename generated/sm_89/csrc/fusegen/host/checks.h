// Argument checks of launchers and the small words they are written in. The Python reference raises
// the same messages: both are printed from one plan.
#pragma once

#include <vector>

#include "fusegen/host/stable.h"

namespace fusegen {

// ---- arguments that may be absent

inline const Tensor* given(const Tensor& tensor) { return &tensor; }
inline const Tensor* given(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

inline const void* pointer(const Tensor& tensor) { return tensor.const_data_ptr(); }
inline const void* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}
inline const void* pointer(const void* address) { return address; }

// A stable Tensor is a handle: a const one still stands for memory that an op may write.
inline void* writable(const Tensor& tensor) { return tensor.mutable_data_ptr(); }
inline void* writable(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->mutable_data_ptr() : nullptr;
}
inline void* writable(void* address) { return address; }

inline const float* floats(const void* address) { return static_cast<const float*>(address); }
inline float* floats(void* address) { return static_cast<float*>(address); }

inline const int64_t* integers(const void* address) { return static_cast<const int64_t*>(address); }
inline int64_t* integers(void* address) { return static_cast<int64_t*>(address); }

// ---- sizes

inline constexpr int64_t ceildiv(int64_t value, int64_t size) { return (value + size - 1) / size; }
inline constexpr int64_t align(int64_t value, int64_t size) { return ceildiv(value, size) * size; }

// Axis counts from the end: -1 is the innermost dimension.
inline int64_t extent(const Tensor& tensor, int64_t axis) { return tensor.size(tensor.dim() + axis); }

// Product of all but the last `trailing` dimensions.
inline int64_t rows(const Tensor& tensor, int64_t trailing) {
  int64_t product = 1;
  for (int64_t axis = 0; axis < tensor.dim() - trailing; ++axis) product *= tensor.size(axis);
  return product;
}

// The leading dimensions of `like`, then `sizes`.
inline Tensor empty_rows(const Tensor& like, int64_t trailing, Sizes sizes, ScalarType dtype) {
  std::vector<int64_t> shape;
  for (int64_t axis = 0; axis < like.dim() - trailing; ++axis) shape.push_back(like.size(axis));
  shape.insert(shape.end(), sizes);
  return empty(shape.data(), shape.size(), dtype, like);
}

// ---- checks: nothing happens where the tensor is absent

inline void check_io_dtype(const char* cell, const char* name, const Tensor* tensor) {
  const ScalarType dtype = tensor->scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    refuse(cell, name, "dtype bfloat16 or float16", dtype_name(dtype));
  }
}

inline void check_same_dtype(const char* cell, const char* name, const Tensor* tensor,
                             const char* first, const Tensor& like) {
  if (tensor != nullptr && tensor->scalar_type() != like.scalar_type()) {
    refuse(cell, name, "dtype " + dtype_name(like.scalar_type()) + ", as " + first,
             dtype_name(tensor->scalar_type()));
  }
}

inline void check_dtype(const char* cell, const char* name, const Tensor* tensor,
                        ScalarType expected) {
  if (tensor != nullptr && tensor->scalar_type() != expected) {
    refuse(cell, name, "dtype " + dtype_name(expected), dtype_name(tensor->scalar_type()));
  }
}

inline std::string device_name(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : "cpu";
}

inline void check_device(const char* cell, const char* name, const Tensor* tensor,
                         const char* first, const Tensor& like) {
  if (tensor == nullptr) return;
  if (tensor->is_cuda() && tensor->get_device_index() == like.get_device_index()) return;
  refuse(cell, name, "device " + device_name(like) + ", as " + first, device_name(*tensor));
}

inline void check_rank(const char* cell, const char* name, const Tensor* tensor, int64_t number,
                       bool exact, const char* shape) {
  if (tensor == nullptr || tensor->dim() == number || (!exact && tensor->dim() > number)) return;
  const std::string least = exact ? "" : "at least ";
  const std::string dimensions = number == 1 ? " dimension " : " dimensions ";
  refuse(cell, name, least + std::to_string(number) + dimensions + shape,
           std::to_string(tensor->dim()));
}

inline void check_contiguous(const char* cell, const char* name, const Tensor* tensor) {
  if (tensor == nullptr || tensor->is_contiguous()) return;
  std::string strides;
  for (int64_t axis = 0; axis < tensor->dim(); ++axis) {
    strides += (axis > 0 ? ", " : "") + std::to_string(tensor->stride(axis));
  }
  refuse(cell, name, "a contiguous tensor", "strides [" + strides + "]");
}

inline void check_size(const char* cell, const char* name, const Tensor* tensor, int64_t axis,
                       int64_t expected, const char* label) {
  if (tensor == nullptr || extent(*tensor, axis) == expected) return;
  refuse(cell, name,
           std::string(label) + " = " + std::to_string(expected) + " in dimension " +
               std::to_string(tensor->dim() + axis),
           std::to_string(extent(*tensor, axis)));
}

inline void check_leading(const char* cell, const char* name, const Tensor* tensor,
                          int64_t trailing, int64_t expected, const char* label) {
  if (tensor == nullptr || rows(*tensor, trailing) == expected) return;
  refuse(cell, name,
           std::string(label) + " = " + std::to_string(expected) + " in the leading dimensions",
           std::to_string(rows(*tensor, trailing)));
}

inline void check_multiple(const char* cell, const char* label, int64_t value, int64_t divisor,
                           const char* arch) {
  if (value % divisor != 0) {
    refuse(cell, label, "a multiple of " + std::to_string(divisor) + " on " + arch,
             std::to_string(value));
  }
}

}  // namespace fusegen
