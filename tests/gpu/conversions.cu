// Conversions of E2M1 and E8M0 in hardware against those in software: for every float there is.
#include <cstdio>

#include "fusegen/quantize/math.cuh"

using namespace fusegen;

__global__ void compare(unsigned long long* differing, uint32_t* example) {
  const uint64_t all = uint64_t(1) << 32, step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < all; i += step) {
    const float value = float_of(uint32_t(i));
    bool same = e8m0_round_up(value) == e8m0_round_up_in_software(value);
    if (i < all / 2) {  // magnitudes
      float values[8];
      for (int k = 0; k < 8; ++k) values[k] = float_of(uint32_t(i ^ k) & 0x7FFFFFFFu);
      same &= nearest_e2m1<8>(values) == nearest_e2m1_in_software<8>(values);
    }
    if (same) continue;
    atomicAdd(differing, 1ull);
    *example = uint32_t(i);
  }
}

int main() {
  unsigned long long* differing;
  uint32_t* example;
  cudaMallocManaged(&differing, sizeof *differing);
  cudaMallocManaged(&example, sizeof *example);
  *differing = *example = 0;
  compare<<<1024, 256>>>(differing, example);
  if (cudaDeviceSynchronize() != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(cudaGetLastError())), 2;
  std::printf("%llu differ, such as %08x\n", *differing, *example);
  return *differing != 0;
}
