// Codes to bf16, for recipes that an architecture has no matrix instruction for.
//
// Every element is code * scale in fp32, rounded once; with a scale that is a power of two or
// E4M3 times an E2M1 code the product is exact. Output as stored, or transposed: columnwise copies
// [columns, padded rows] become the row-major operand [padded rows, columns] of a bf16 product,
// which then runs over groups of the padded sizes. Tiles of 64 x 64 turn over in shared memory.
#pragma once

#include "quantize.h"
#include "quantize_tile.cuh"

namespace fusegen {

enum class ScaleType { fp32, e8m0, e4m3 };

template <class Format_, ScaleType type, int block, bool transposed>
struct DequantizeConfig {
  using Format = Format_;
  static constexpr ScaleType kType = type;
  static constexpr int kBlock = block;  // elements of a line that share a scale
  static constexpr bool kTransposed = transposed;
  static_assert(block % 8 == 0);
};

namespace quantizing {

inline constexpr int kDequantizeTile = 64;
inline constexpr int kOctet = 8;  // elements that a thread decodes at once: 16 bytes of bf16

template <ScaleType type>
__device__ __forceinline__ float scale_at(const void* scales, int64_t index) {
  if constexpr (type == ScaleType::fp32) return static_cast<const float*>(scales)[index];
  const uint32_t code = static_cast<const uint8_t*>(scales)[index];
  return type == ScaleType::e8m0 ? e8m0_value(code) : decode<E4M3>(code);
}

// Elements [at, at + 8) of a line.
template <class Config>
__device__ __forceinline__ void decode_octet(float (&values)[kOctet], const DequantizeArguments& in,
                                             int64_t matrix, int64_t line, int64_t at) {
  using Format = typename Config::Format;
  const auto* codes = static_cast<const uint8_t*>(in.data) +
                      (matrix * in.lines + line) * in.pitch + at * Format::kBits / 8;
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < Format::kBits / 4; ++w) {
    words[w] = reinterpret_cast<const uint32_t*>(codes)[w];
  }
  const float scale = scale_at<Config::kType>(
      in.scale, matrix * in.scale_matrix + line / in.lines_per_scale * in.scale_line +
                    at / Config::kBlock * in.scale_block);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    constexpr int kPerWord = 32 / Format::kBits;
    const uint32_t code = words[i / kPerWord] >> (i % kPerWord * Format::kBits);
    values[i] = decode<Format>(code & ((1u << Format::kBits) - 1)) * scale;
  }
}

__device__ __forceinline__ void store_octet(__nv_bfloat16* to, const float (&values)[kOctet]) {
  struct alignas(16) Octet {
    __nv_bfloat16 elements[kOctet];
  } octet;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) octet.elements[i] = __float2bfloat16_rn(values[i]);
  *reinterpret_cast<Octet*>(to) = octet;
}

// Grid: x tiles along a line, y tiles of lines, z matrices.
template <class Config>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeArguments in) {
  constexpr int kTile = kDequantizeTile;
  __shared__ float turned[kTile][kTile + 1];
  const int64_t matrix = blockIdx.z;
  const int64_t first_line = int64_t(blockIdx.y) * kTile, first = int64_t(blockIdx.x) * kTile;
  auto* output = static_cast<__nv_bfloat16*>(in.output) + matrix * in.lines * in.length;
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kTile / kOctet; i += kThreads) {
    const int line = i / (kTile / kOctet), octet = i % (kTile / kOctet) * kOctet;
    if (first_line + line >= in.lines || first + octet >= in.length) continue;
    float values[kOctet];
    decode_octet<Config>(values, in, matrix, first_line + line, first + octet);
    if constexpr (Config::kTransposed) {
#pragma unroll
      for (int e = 0; e < kOctet; ++e) turned[octet + e][line] = values[e];
    } else {
      store_octet(output + (first_line + line) * in.length + first + octet, values);
    }
  }
  if constexpr (Config::kTransposed) {
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kTile / kOctet; i += kThreads) {
      const int row = i / (kTile / kOctet), octet = i % (kTile / kOctet) * kOctet;
      if (first + row >= in.length || first_line + octet >= in.lines) continue;
      float values[kOctet];
#pragma unroll
      for (int e = 0; e < kOctet; ++e) values[e] = turned[row][octet + e];
      store_octet(output + (first + row) * in.lines + first_line + octet, values);
    }
  }
}

}  // namespace quantizing

// Lines are a multiple of 8 elements; where transposed there are a multiple of 8 of them, too.
template <class Config>
static Status launch_dequantize(const DequantizeArguments& in, cudaStream_t stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.length % 8 != 0) return {kInvalid, "length: a multiple of 8"};
  if (Config::kTransposed && in.lines % 8 != 0) return {kInvalid, "lines: a multiple of 8"};
  if (in.pitch % 16 != 0) return {kInvalid, "pitch % 16 = 0"};
  if (in.lines_per_scale < 1) return {kInvalid, "lines_per_scale >= 1"};
  if (in.matrices == 0 || in.lines == 0 || in.length == 0) return {};
  constexpr int64_t kTile = quantizing::kDequantizeTile;
  const int64_t line_tiles = (in.lines + kTile - 1) / kTile;
  if (line_tiles > 65535 || in.matrices > 65535) return {kInvalid, "lines <= 65535 * 64"};
  const dim3 grid(unsigned((in.length + kTile - 1) / kTile), unsigned(line_tiles),
                  unsigned(in.matrices));
  return quantizing::launch_grid("cudaLaunchKernelEx(dequantize)",
                                 &quantizing::dequantize_kernel<Config>, grid, quantizing::kThreads,
                                 in, stream);
}

}  // namespace fusegen
