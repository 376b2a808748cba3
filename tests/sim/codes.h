// GEMMs of FP8 operands: their codes and scales, in the layouts that gemm_fp8.h describes.
#pragma once

#include "problems.h"

#include "fusegen/gemm/gemm_fp8.h"

namespace sim {

using fusegen::Accumulation;
using fusegen::Fp8GemmArguments;
using fusegen::Fp8Scaling;

// Codes that lie as tensors do, in rows; no group has a place of its own.
struct CodesAsRows : Problem {
  explicit CodesAsRows(const Problem& problem) : Problem(problem) {}

  int64_t pitch_a() const { return ceil_div(fprop() ? in.k : in.n, 16) * 16; }
  int64_t pitch_b() const { return ceil_div(in.k, 16) * 16; }
  int64_t codes_a() const { return in.tokens * pitch_a(); }
  int64_t codes_b() const { return (wgrad() ? in.tokens : in.groups() * in.n) * pitch_b(); }
  int64_t code_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? (begin(g) + k) * pitch_a() + row : (begin(g) + row) * pitch_a() + k;
  }
  int64_t code_b(int64_t g, int64_t column, int64_t k) const {
    switch (kind) {
      case Gemm::fprop: return (g * in.n + column) * pitch_b() + k;
      case Gemm::dgrad: return (g * in.n + k) * pitch_b() + column;
      case Gemm::wgrad: return (begin(g) + k) * pitch_b() + column;
    }
    return -1;
  }
};

// `Codes` says where those lie.
template <Fp8Scaling scaling, class Codes>
struct ScalePlaces : Codes {
  using Codes::begin, Codes::columns, Codes::fprop, Codes::in, Codes::padded,
      Codes::padded_tokens, Codes::token_block, Codes::token_blocks, Codes::weight_block,
      Codes::weight_k, Codes::wgrad;

  explicit ScalePlaces(const Problem& problem) : Codes(problem) {}

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

// `launch` takes the arguments, and how the kernel stores.
template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, class Codes = Problem,
          class Launch>
void run_codes(const Case& in, Launch launch) {
  const ScalePlaces<scaling, Codes> problem{Problem(kind, in)};
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
  if (std::is_same_v<Codes, Problem> && problem.wgrad() && !in.dense()) {
    a.pad_tokens(problem, in.n);
    b.pad_tokens(problem, in.k);
  }
  const auto launch_codes = [&](const GemmArguments& common, auto as) {
    return launch(Fp8GemmArguments{common, problem.pitch_a(), problem.pitch_b(), a.scales.data(),
                                   b.scales.data(), in.scale_per_group, in.scale_per_group},
                  as);
  };
  run_and_check<store>(problem, operands, a.codes.data(), b.codes.data(), launch_codes);
}

}  // namespace sim
