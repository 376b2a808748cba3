// Products with the parts of a weight, added up to those with the weight, the smallest first; a
// thread has 4 columns of a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/fp32_weight/fp32_weight.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace fp32_weight {

inline constexpr int kColumns = 4;  // of a thread

template <class Element>
static __global__ void __launch_bounds__(kFp32WeightThreads)
    add_products(const __grid_constant__ AddProductsArguments in) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t four = int64_t(blockIdx.x) * kFp32WeightThreads + threadIdx.x;
  const int64_t fours = in.n / kColumns;
  const int64_t row = four / fours, column = four % fours * kColumns;
  if (row >= in.tokens) return;
  float4 parts[kWeightParts];
#pragma unroll
  for (int i = 0; i < kWeightParts; ++i) {
    const float* const from = in.products + (row * kWeightParts + i) * in.n + column;
    parts[i] = __ldg(reinterpret_cast<const float4*>(from));
  }
  float4 sum = parts[kWeightParts - 1];
  const auto add = [](float left, float right) { return left / kPartScale + right; };
#pragma unroll
  for (int i = kWeightParts - 2; i >= 0; --i) {
    sum = {add(sum.x, parts[i].x), add(sum.y, parts[i].y), add(sum.z, parts[i].z),
           add(sum.w, parts[i].w)};
  }
  if (in.bias != nullptr) {
    const Element* const bias = static_cast<const Element*>(in.bias) + column;
    sum = {sum.x + row::widen(bias[0]), sum.y + row::widen(bias[1]),
           sum.z + row::widen(bias[2]), sum.w + row::widen(bias[3])};
  }
  *reinterpret_cast<float4*>(in.sums + row * in.n + column) = sum;
}

}  // namespace fp32_weight

template <class Element>
static Status launch_add_products(const AddProductsArguments& in, Stream& stream) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (in.n < kRowAlignment || in.n % kRowAlignment != 0) return {kInvalid, "n: a multiple of 8"};
  const int64_t threads = in.tokens * (in.n / fp32_weight::kColumns);
  const int64_t blocks = ceil_div(threads, kFp32WeightThreads);
  if (blocks > INT32_MAX) return {kInvalid, "add_products: fewer than 2^41 sums"};
  if (blocks == 0) return {};
  const Grid grid{dim3(unsigned(blocks)), kFp32WeightThreads};
  return launch_kernel("cudaLaunchKernelEx(add_products)", &fp32_weight::add_products<Element>,
                       grid, stream, in);
}

}  // namespace fusegen
