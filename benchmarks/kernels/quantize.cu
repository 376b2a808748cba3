// The quantise kernels behind C functions, and what only a GPU can show: that its instructions agree
// with the software encoder on every float.
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

}  // namespace

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
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return cudaDeviceSynchronize();
}
