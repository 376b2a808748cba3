// Glue between the launchers and LibTorch's stable ABI, as of PyTorch 2.11: streams, devices,
// allocation, errors (checks.h has the checks of arguments). Host C++17; no CUTLASS here, so that launchers compile fast.
//
// Every error is a std::runtime_error, which Python sees as RuntimeError, and reads
//   <cell>: <tensor>: expected <this>, got <that>

#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

// The CUDA half of PyTorch, declared weak: the library also loads where PyTorch has no CUDA. There
// they are null, and no call arrives, since no tensor is on a CUDA device.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                        void** ret_stream);
__attribute__((weak)) AOTITorchError torch_c10_cuda_check_msg(int32_t err, const char* filename,
                                                              const char* function_name,
                                                              uint32_t line_number,
                                                              bool include_device_assertions,
                                                              char** error_msg);
__attribute__((weak)) void torch_c10_cuda_free_error_msg(char* error_msg);
}

namespace fusegen {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

using Sizes = std::initializer_list<int64_t>;

// Bulk tensor copies and 16-byte vector loads need it of every base address.
inline constexpr std::uintptr_t kAlignment = 16;

// Which GPUs run code, beside those of its own capability: none, such as of sm_90a; later minor versions
// of the same major one; all later ones, where a library has PTX, which the driver compiles.
enum class Reach { none, minor, later };

// The architecture that a library was compiled for.
struct Arch {
  const char* name;
  int major;
  int minor;
  Reach reach;

  constexpr bool runs_on(int device_major, int device_minor) const {
    const int own = major * 100 + minor, device = device_major * 100 + device_minor;
    return device == own || (device > own && (reach == Reach::later ||
                                              (reach == Reach::minor && device_major == major)));
  }
};

// ---- errors

[[noreturn]] inline void fail(const std::string& cell, const std::string& what) {
  throw std::runtime_error(cell + ": " + what);
}

[[noreturn]] inline void refuse(const char* cell, const char* tensor, const std::string& expected,
                                  const std::string& got) {
  fail(cell, std::string(tensor) + ": expected " + expected + ", got " + got);
}

inline void check(const char* cell, cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    fail(cell, std::string(what) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
  }
}

// Of what a kernel's host function returns (common/status.h). A driver's code prints as well: both
// interfaces number their errors alike.
template <class Status>
void check(const char* cell, const Status& status) {
  if (!status.ok()) {
    const auto code = static_cast<cudaError_t>(status.code);
    fail(cell, std::string(status.call) + ": " + cudaGetErrorName(code) + ": " +
                   cudaGetErrorString(code));
  }
}

// ---- devices

inline cudaStream_t current_stream(const char* cell, int32_t device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    fail(cell, "this PyTorch has no CUDA support");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// What is asked of a device once per process, packed into one word; 0 where not yet asked.
struct DeviceFacts {
  int major;
  int minor;
  int sm_count;
};

inline DeviceFacts device_facts(const char* cell, int32_t device) {
  constexpr int kSlots = 64;
  static std::array<std::atomic<uint32_t>, kSlots> known{};
  const bool has_slot = device >= 0 && device < kSlots;
  uint32_t word = has_slot ? known[device].load(std::memory_order_relaxed) : 0;
  if (word == 0) {
    const auto ask = [&](cudaDeviceAttr attribute) {
      int value = 0;
      check(cell, cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
      return static_cast<uint32_t>(value);
    };
    word = ask(cudaDevAttrComputeCapabilityMajor) << 24 |
           ask(cudaDevAttrComputeCapabilityMinor) << 16 | ask(cudaDevAttrMultiProcessorCount);
    if (has_slot) {
      known[device].store(word, std::memory_order_relaxed);
    }
  }
  return {static_cast<int>(word >> 24), static_cast<int>(word >> 16 & 0xff),
          static_cast<int>(word & 0xffff)};
}

inline int sm_count(const char* cell, int32_t device) { return device_facts(cell, device).sm_count; }

// Gives the calling thread a CUDA context, once per thread and device: descriptors are encoded by the
// driver, which makes none itself, and PyTorch's backward threads have none until a runtime call.
inline void use_context(const char* cell, int32_t device) {
  static thread_local uint64_t ready = 0;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((ready & bit) == 0) {
    check(cell, cudaSetDevice(device), "cudaSetDevice");
    ready |= bit;
  }
}

// Raises unless a device runs code for `arch`. `name` is the tensor that lies on it.
inline void require_capability(const char* cell, const char* name, const Arch& arch,
                               const DeviceFacts& facts) {
  if (arch.runs_on(facts.major, facts.minor)) return;
  const std::string capability = std::to_string(facts.major) + "." + std::to_string(facts.minor);
  const std::string words = cell;
  const auto bar = words.find("__");
  const std::string rest = bar == std::string::npos ? "" : words.substr(bar + 2);
  fail(cell, std::string("built for ") + arch.name + ", but " + name +
                 " is on a device of capability " + capability +
                 "; run, where that device is: fusegen generate --arch native --module " +
                 words.substr(0, bar) +
                 (rest.empty() ? "" : " --recipe " + rest.substr(0, rest.find("__"))));
}

// Raises unless the tensor is on a CUDA device that runs code for `arch`. Returns the device's index.
inline int32_t require_arch(const char* cell, const char* name, const Tensor& tensor,
                            const Arch& arch) {
  if (!tensor.is_cuda()) {
    refuse(cell, name, "a tensor on a CUDA device", "one on the CPU or another device");
  }
  const int32_t device = tensor.get_device_index();
  require_capability(cell, name, arch, device_facts(cell, device));
  return device;
}

// ---- arguments

// The name that Python gives a dtype.
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    default: return torch::headeronly::toString(dtype);
  }
}

// ---- memory

// Uninitialised and contiguous, on the device of `like`, from PyTorch's caching allocator: safe under
// capture. `stable::new_empty` finds its operator by name on every call and boxes the arguments,
// which takes as long again as the allocation.
inline Tensor empty(const int64_t* sizes, size_t rank, ScalarType dtype, const Tensor& like) {
  constexpr size_t kMostRanks = 64;  // PyTorch's own limit
  std::array<int64_t, kMostRanks> strides;
  if (rank > kMostRanks) fail("empty", "expected at most 64 dimensions");
  int64_t stride = 1;
  for (size_t axis = rank; axis-- > 0;) {
    strides[axis] = stride;
    stride *= sizes[axis] > 1 ? sizes[axis] : 1;  // as PyTorch has it where a size is 0
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(rank), sizes, strides.data(), code,
                                                  device_type, like.get_device_index(), &made));
  return Tensor(made);
}

inline Tensor empty(Sizes sizes, ScalarType dtype, const Tensor& like) {
  return empty(sizes.begin(), sizes.size(), dtype, like);
}

// The tensor itself where it is contiguous and starts at a multiple of 16 bytes, else a copy.
// A slice that starts in the middle of a storage is contiguous and yet may start anywhere.
inline Tensor dense(const Tensor& tensor) {
  // Asking first spares a call of the dispatcher, most of a microsecond per operand.
  const Tensor packed = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  const auto address = reinterpret_cast<std::uintptr_t>(packed.const_data_ptr());
  return address % kAlignment == 0 ? packed : torch::stable::clone(packed);
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(dense(*tensor)) : std::nullopt;
}

}  // namespace fusegen
