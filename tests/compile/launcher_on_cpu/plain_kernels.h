// Kernels of bfloat16 that launchers may be run with on the CPU: GEMMs and conversions as loops, the
// cross entropy as it is.
#pragma once

#include <cuda_bf16.h>

#include <cstring>

#include "fusegen/gemm/gemm.h"
#include "fusegen/host/stable.h"
#include "fusegen/launch/stream.h"
#include "fusegen/pointwise/pointwise.h"
#include "fusegen/softmax/cross_entropy.cuh"
#include "fusegen/softmax/cross_entropy_grad.cuh"

namespace plain {

using namespace fusegen;

inline float element(const void* matrix, int64_t index) {
  return __bfloat162float(static_cast<const __nv_bfloat16*>(matrix)[index]);
}

inline void put(void* to, int64_t index, float value, Store store) {
  if (store == Store::io) {
    static_cast<__nv_bfloat16*>(to)[index] = __float2bfloat16_rn(value);
  } else {
    float& place = static_cast<float*>(to)[index];
    place = store == Store::add ? place + value : value;
  }
}

// Each element's sum runs along the contraction, from the first product to the last.
inline Status gemm(Gemm kind, Store store, const GemmArguments& in) {
  const int64_t rows = kind == Gemm::wgrad ? in.n : in.tokens;
  const int64_t columns = kind == Gemm::fprop ? in.n : in.k;
  const int64_t depth = kind == Gemm::fprop ? in.k : kind == Gemm::dgrad ? in.n : in.tokens;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      float sum = 0.0f;
      for (int64_t i = 0; i < depth; ++i) {
        const int64_t a = kind == Gemm::wgrad ? i * rows + row : row * depth + i;
        const int64_t b = kind == Gemm::fprop ? column * depth + i : i * columns + column;
        sum += element(in.a, a) * element(in.b, b);
      }
      put(in.d, row * columns + column, sum, store);
    }
  }
  return {};
}

inline Status narrow(const PointwiseArguments& in) {
  for (int64_t i = 0; i < in.rows * in.columns; ++i) {
    put(in.results[0], i, static_cast<const float*>(in.operands[0])[i], Store::io);
  }
  return {};
}

inline Status run(const CrossEntropyArguments& in, Stream& stream) {
  return launch_cross_entropy<__nv_bfloat16>(in, stream);
}
inline Status run(const CrossEntropyGradArguments& in, Stream& stream) {
  return launch_cross_entropy_grad<__nv_bfloat16>(in, stream);
}

}  // namespace plain
