// Expressions that results go through, as the generator prints them, and what they give.
#pragma once

#include <cuda_bf16.h>

#include "fusegen/gemm/gemm.h"
#include "fusegen/pointwise/slot.h"
#include "fusegen/sink/change.cuh"
#include "fusegen/sink/gated.cuh"

namespace sim {

using fusegen::Store;

struct Elements {
  static constexpr fusegen::Slot operand(int) { return {fusegen::Access::full, false}; }
  static constexpr fusegen::Slot result(int) { return operand(0); }
};

// result * factor + summand: nothing that is zero stays so.
struct Affine : Elements {
  static constexpr int operand_count = 1, result_count = 1;

  static void apply(const float* in, float* out, const float* scalars) {
    out[0] = in[0] * scalars[0] + scalars[1];
  }
};

// other - result * factor: the operands cannot change places.
struct Difference : Elements {
  static constexpr int operand_count = 2, result_count = 1;

  static void apply(const float* in, float* out, const float* scalars) {
    out[0] = in[0] - in[1] * scalars[0];
  }
};

// (first * factor + summand) (second + 1) row: of both halves of a row, and of a value of it that
// comes before them.
struct Halves {
  static constexpr int operand_count = 3, result_count = 1;

  static constexpr fusegen::Slot operand(int index) {
    using fusegen::Access;
    if (index == 0) return {Access::row, true};
    return {index == 1 ? Access::first_half : Access::second_half, false};
  }
  static constexpr fusegen::Slot result(int) { return {fusegen::Access::full, false}; }

  static void apply(const float* in, float* out, const float* scalars) {
    out[0] = (in[1] * scalars[0] + scalars[1]) * (in[2] + 1) * in[0];
  }
};

constexpr float kFactor = 0.75f, kSummand = 3.0f, kOtherFactor = -0.5f;
constexpr fusegen::EpilogueArguments kEpilogue{nullptr, {kFactor, kSummand, kOtherFactor}};

// How a kernel is launched that stores so.
template <Store store>
struct As {
  static constexpr Store kStore = store;
  fusegen::Keep change;
};
template <>
struct As<Store::unary> {
  static constexpr Store kStore = Store::unary;
  fusegen::Expressions<__nv_bfloat16, fusegen::Expression<Affine, 0, 0>> change{
      kEpilogue.scalars};
};
template <>
struct As<Store::unary_aux> : As<Store::unary> {
  static constexpr Store kStore = Store::unary_aux;
};
template <>
struct As<Store::binary> {
  static constexpr Store kStore = Store::binary;
  fusegen::Expressions<__nv_bfloat16, fusegen::Expression<Affine, 0, 0>,
                       fusegen::Expression<Difference, 1, 2>>
      change{kEpilogue.scalars};
};

template <>
struct As<Store::gated> {
  static constexpr Store kStore = Store::gated;
  fusegen::Gated<__nv_bfloat16, Halves, 1, 2> change{kEpilogue.scalars};
};
template <>
struct As<Store::gated_aux> : As<Store::gated> {
  static constexpr Store kStore = Store::gated_aux;
};

// The same by kernels of their own, each of which rounds what it gives.
inline __nv_bfloat16 apart(Store store, __nv_bfloat16 result, __nv_bfloat16 other) {
  const auto value = [&] { return __bfloat162float(result); };
  result = __float2bfloat16(value() * kFactor + kSummand);
  if (store != Store::binary) return result;
  return __float2bfloat16(__bfloat162float(other) - value() * kOtherFactor);
}

inline __nv_bfloat16 gated_apart(__nv_bfloat16 first, __nv_bfloat16 second, float row) {
  const float in[] = {row, __bfloat162float(first), __bfloat162float(second)};
  float out[1];
  Halves::apply(in, out, kEpilogue.scalars.data());
  return __float2bfloat16(out[0]);
}

}  // namespace sim
