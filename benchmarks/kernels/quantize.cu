// The quantise kernels and sums over groups behind C functions, and what only a GPU can show: that its
// instructions agree with the software encoder on every float, and with maxima of magnitudes on all
// operands.
#include "group_sum_kernels.cuh"
#include "quantize_kernels.cuh"

namespace {

template <class Format>
__global__ void every_float(unsigned long long* differences, unsigned* example, float one) {
  const unsigned long long step = 1ull * gridDim.x * blockDim.x;
  unsigned long long bits = 1ull * blockIdx.x * blockDim.x + threadIdx.x;
  for (; bits < (1ull << 32); bits += step) {
    const float value = __uint_as_float(static_cast<unsigned>(bits));
    unsigned found;
    if constexpr (Format::kBits == 4) {
      const float magnitude = fabsf(value) * one;  // E2M1 codes are those of products
      const unsigned code = nearest_e2m1<1>(&magnitude) & 0xF;
      const unsigned sign = value != value ? 0 : bits_of(value) >> 28;
      found = with_signs(code * 0x11, sign | (sign ^ (value != value ? 0 : 8)) << 4) & 0xFF;
    } else {
      found = encode_pair<Format>(value, -value);
    }
    const unsigned wanted = encode_in_software<Format>(value) |
                            encode_in_software<Format>(-value) << Format::kBits;
    if (found != wanted) {
      atomicAdd(differences, 1ull);
      *example = static_cast<unsigned>(bits);
    }
  }
}

// The second operand has the halves of the first the other way round: both meet all pairs of values.
template <class Element, bool kNan>
__global__ void every_pair(unsigned long long* differences, unsigned* example) {
  using namespace quantizing;
  const unsigned long long step = 1ull * gridDim.x * blockDim.x;
  unsigned long long bits = 1ull * blockIdx.x * blockDim.x + threadIdx.x;
  for (; bits < (1ull << 32); bits += step) {
    const unsigned a = static_cast<unsigned>(bits), b = __byte_perm(a, 0, 0x1032);
    const unsigned found = magnitude<Element>(
        larger_magnitude<Element, kNan>(comparable<Element>(a), comparable<Element>(b)));
    const unsigned wanted =
        larger_of_magnitudes<Element, kNan>(magnitude<Element>(a), magnitude<Element>(b));
    if (found != wanted) {
      atomicAdd(differences, 1ull);
      *example = a;
    }
  }
}

int finish() {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return cudaDeviceSynchronize();
}

}  // namespace

// Whether the instruction for larger magnitudes gives what comparing magnitudes gives. Waits for the
// result.
extern "C" int run_every_pair(int half, int nan, void* differences, void* example) {
  const auto kernel = half ? nan ? &every_pair<__half, true> : &every_pair<__half, false>
                      : nan ? &every_pair<__nv_bfloat16, true> : &every_pair<__nv_bfloat16, false>;
  kernel<<<2048, 256>>>(static_cast<unsigned long long*>(differences),
                        static_cast<unsigned*>(example));
  return finish();
}

// format: 0 e4m3, 1 e5m2, 2 e2m1. Waits for the result.
extern "C" int run_every_float(int format, void* differences, void* example) {
  auto* count = static_cast<unsigned long long*>(differences);
  auto* bits = static_cast<unsigned*>(example);
  if (format == 0) {
    every_float<E4M3><<<2048, 256>>>(count, bits, 1.0f);
  } else if (format == 1) {
    every_float<E5M2><<<2048, 256>>>(count, bits, 1.0f);
  } else {
    every_float<E2M1><<<2048, 256>>>(count, bits, 1.0f);
  }
  return finish();
}
