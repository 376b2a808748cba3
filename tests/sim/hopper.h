// The GEMMs of sm_90a.
#pragma once

#include "problems.h"

#include "fusegen/gemm/gemm_decoded.sm90.cuh"
#include "fusegen/gemm/launch_fp8.sm90.cuh"

namespace sim {

using fusegen::Accumulation;
using fusegen::Fp8GemmArguments;
using fusegen::Fp8Scaling;

template <Gemm kind, Store store, class Config>
void run_hopper(const Case& in) {
  run_16_bits<kind, store>(in, unscaled, unscaled, [](const GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_gemm<kind, Result, Config, as.kStore>(arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, bool amaxes, class Config>
void run_decoded_hopper(const Case& in) {
  run_decoded<kind, store, amaxes>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    constexpr EndScale kNone = EndScale::none;
    return fusegen::launch_decoded_gemm<kind, Result, Config, as.kStore, kNone, kNone>(
        arguments, stream, as.change);
  });
}

template <Gemm kind, Store store, EndScale of_a, EndScale of_b, class Config>
void run_scaled_hopper(const Case& in) {
  run_scaled<kind, store, of_a, of_b>(in, [](const DecodedGemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_decoded_gemm<kind, Result, Config, as.kStore, of_a, of_b>(
        arguments, stream, as.change);
  });
}

template <Fp8Scaling scaling>
struct ScalePlaces : Problem {
  explicit ScalePlaces(const Problem& problem) : Problem(problem) {}

  int64_t count_a() const {
    switch (scaling) {
      case Fp8Scaling::tensor: return in.scale_per_group ? in.groups() : 1;
      case Fp8Scaling::row: return wgrad() ? in.groups() * in.n : in.tokens;
      case Fp8Scaling::block:
        return wgrad() ? token_blocks() * in.n : ceil_div(weight_k(), 128) * padded_tokens();
    }
    return 0;
  }
  int64_t count_b() const {
    switch (scaling) {
      case Fp8Scaling::tensor: return in.scale_per_group ? in.groups() : 1;
      case Fp8Scaling::row: return in.groups() * columns();
      case Fp8Scaling::block:
        return wgrad() ? token_blocks() * in.k
                       : in.groups() * ceil_div(in.n, 128) * ceil_div(in.k, 128);
    }
    return 0;
  }
  int64_t scale_a(int64_t g, int64_t row, int64_t k) const {
    switch (scaling) {
      case Fp8Scaling::tensor: return in.scale_per_group ? g : 0;
      case Fp8Scaling::row: return (wgrad() ? g * in.n : begin(g)) + row;
      case Fp8Scaling::block:
        return wgrad() ? token_block(g, k) * in.n + row
                       : k / 128 * padded_tokens() + padded(g) + row;
    }
    return -1;
  }
  int64_t scale_b(int64_t g, int64_t column, int64_t k) const {
    switch (scaling) {
      case Fp8Scaling::tensor: return in.scale_per_group ? g : 0;
      case Fp8Scaling::row: return g * columns() + column;
      case Fp8Scaling::block:
        if (wgrad()) return token_block(g, k) * in.k + column;
        return fprop() ? weight_block(g, column, k) : weight_block(g, k, column);
    }
    return -1;
  }
};

// Codes and scales of one operand, both NaN until drawn.
template <class Code>
struct Quantized {
  static constexpr uint8_t kNan = 0x7f;  // in both formats

  Buffer<uint8_t> codes;
  Buffer<float> scales;

  Quantized(int64_t code_count, int64_t scale_count)
      : codes(code_count, kNan), scales(scale_count, std::numeric_limits<float>::quiet_NaN()) {}

  double draw(int64_t code_at, int64_t scale_at) {
    const Code code(random_value());
    codes[code_at] = code.__x;
    float& scale = scales[scale_at];
    if (std::isnan(scale)) scale = random_scale();
    return double(float(code)) * scale;
  }

  // Zeros after a group's tokens up to a multiple of 32.
  void pad_tokens(const Problem& problem, int64_t rows) {
    for (int64_t g = 0; g < problem.in.groups(); ++g) {
      const int64_t tokens = problem.tokens(g), end = ceil_div(tokens, 32) * 32;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k = tokens; k < end; ++k) codes[problem.code_a(g, row, k)] = 0;
      }
    }
  }
};

template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, Accumulation accumulation,
          class Config>
void run_fp8(const Case& in) {
  const ScalePlaces<scaling> problem{Problem(kind, in)};
  Quantized<A> a(problem.codes_a(), problem.count_a());
  Quantized<B> b(problem.codes_b(), problem.count_b());
  Operands operands;
  for (int64_t g = 0; g < in.groups(); ++g) {
    operands.a.emplace_back(problem.rows(g), problem.k_of(g), [&](int64_t row, int64_t k) {
      return a.draw(problem.code_a(g, row, k), problem.scale_a(g, row, k));
    });
    operands.b.emplace_back(problem.columns(), problem.k_of(g), [&](int64_t column, int64_t k) {
      return b.draw(problem.code_b(g, column, k), problem.scale_b(g, column, k));
    });
  }
  if (problem.wgrad() && !in.dense()) {
    a.pad_tokens(problem, in.n);
    b.pad_tokens(problem, in.k);
  }
  const auto launch = [&](const GemmArguments& common, auto as) {
    const Fp8GemmArguments arguments{common,          problem.pitch(), problem.pitch(),
                                     a.scales.data(), b.scales.data(), in.scale_per_group,
                                     in.scale_per_group};
    Stream stream;
    return fusegen::launch_fp8_gemm<kind, A, B, Result, scaling, accumulation, Config, as.kStore>(
        arguments, stream, as.change);
  };
  run_and_check<store>(problem, operands, a.codes.data(), b.codes.data(), launch);
}

}  // namespace sim
