// Operands of GEMMs whose scales the instruction reads: codes, and scales in atoms of 128 rows by 4
// blocks, in the layouts that gemm_scaled.h describes. Scales of rows that nobody has are NaN.
#pragma once

#include "problems.h"

#include "fusegen/gemm/gemm_scaled.h"

namespace sim {

using fusegen::ScaledGemmArguments;

// Of elements of `bits`, `block` of which share a scale.
template <int bits, int block>
struct AtomPlaces : Problem {
  static constexpr int64_t kDepth = 4 * block;  // of an atom

  explicit AtomPlaces(const Problem& problem) : Problem(problem) {}

  // A transform leaves codes in the whole of a group's last 16.
  int64_t length(int64_t g) const {
    return wgrad() && bits == 4 ? ceil_div(tokens(g), 16) * 16 : k_of(g);
  }
  int64_t start(int64_t g) const { return in.dense() ? 0 : 128 * (begin(g) / 128 + g); }
  int64_t row_atoms() const { return in.dense() ? ceil_div(in.tokens, 128) : in.tokens / 128 + in.groups(); }
  int64_t stored() const { return wgrad() ? in.dense() ? in.tokens : 128 * row_atoms() : weight_k(); }
  int64_t atoms() const {
    return wgrad() && !in.dense() ? row_atoms() * 128 / kDepth : ceil_div(stored(), kDepth);
  }

  int64_t row_bytes() const { return ceil_div(stored() * bits, 128) * 16; }
  int64_t bytes_a() const { return (wgrad() ? in.n : in.tokens) * row_bytes(); }
  int64_t bytes_b() const { return (wgrad() ? in.k : in.groups() * columns()) * row_bytes(); }
  // Of the code's first bit.
  int64_t bit_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? row * row_bytes() * 8 + (start(g) + k) * bits
                   : (begin(g) + row) * row_bytes() * 8 + k * bits;
  }
  int64_t bit_b(int64_t g, int64_t column, int64_t k) const {
    return wgrad() ? column * row_bytes() * 8 + (start(g) + k) * bits
                   : (g * columns() + column) * row_bytes() * 8 + k * bits;
  }

  int64_t place(int64_t row, int64_t k) const {
    const int64_t atom = row / 128 * atoms() + k / kDepth;
    return atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + k / block % 4;
  }
  int64_t scales_a() const { return (wgrad() ? ceil_div(in.n, 128) : row_atoms()) * atoms() * 512; }
  int64_t scales_b() const {
    return ceil_div(columns(), 128) * (wgrad() ? 1 : in.groups()) * atoms() * 512;
  }
  int64_t scale_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? place(row, start(g) + k) : place(start(g) + row, k);
  }
  int64_t scale_b(int64_t g, int64_t column, int64_t k) const {
    return wgrad() ? place(column, start(g) + k)
                   : g * ceil_div(columns(), 128) * atoms() * 512 + place(column, k);
  }
};

template <Format format>
struct ScaledOperand {
  static constexpr bool kSmall = format == Format::e2m1;
  static constexpr int kBits = kSmall ? 4 : 8, kBlock = kSmall ? 16 : 32;

  Buffer<uint8_t> codes, scales;

  // All codes and scales are NaN until drawn, or 6 where there is no NaN.
  ScaledOperand(int64_t bytes, int64_t scale_bytes)
      : codes(bytes, kSmall ? 0x77 : 0x7f), scales(scale_bytes, kSmall ? 0x7f : 0xff) {}

  void set(int64_t bit, uint32_t code) {
    uint8_t& byte = codes[bit / 8];
    const uint32_t mask = ((1u << kBits) - 1) << bit % 8;
    byte = uint8_t((byte & ~mask) | code << bit % 8);
  }
  double draw(int64_t bit, int64_t scale_at) {
    const uint32_t code = random_code();
    set(bit, code);
    uint8_t& scale = scales[scale_at];
    if (scale == (kSmall ? 0x7f : 0xff)) scale = random_scale_code();
    const uint8_t at[1] = {uint8_t(code)};
    return double(decode(at, format)) * scale_value(scale);
  }
  // Past the end of a group's contraction.
  void pad_scale(int64_t at) {
    if (scales[at] == (kSmall ? 0x7f : 0xff)) scales[at] = 0;
  }

 private:
  static uint32_t random_code() {
    if (kSmall) return random_numbers() % 16;
    if constexpr (format == Format::e5m2) return __nv_fp8_e5m2(random_value()).__x;
    return __nv_fp8_e4m3(random_value()).__x;
  }
  static uint8_t random_scale_code() {
    return kSmall ? __nv_fp8_e4m3(random_scale()).__x : uint8_t(124 + random_numbers() % 7);
  }
  static double scale_value(uint8_t code) {
    return kSmall ? double(decode(&code, Format::e4m3)) : std::ldexp(1.0, int(code) - 127);
  }
};

// `launch` takes the arguments, and how the kernel stores.
template <Gemm kind, Store store, Format format_a, Format format_b, class Launch>
void run_atoms(const Case& in, Launch launch) {
  using A = ScaledOperand<format_a>;
  using B = ScaledOperand<format_b>;
  const AtomPlaces<A::kBits, A::kBlock> problem{Problem(kind, in)};
  A a(problem.bytes_a(), problem.scales_a());
  B b(problem.bytes_b(), problem.scales_b());
  Buffer<float> amax_a(in.groups(), kNan), amax_b(in.groups(), kNan);
  Operands operands;
  for (int64_t g = 0; g < in.groups(); ++g) {
    const int64_t length = problem.length(g);
    double factor = 1.0;
    if (A::kSmall && problem.tokens(g) > 0) {
      amax_a[g] = 2688 * random_scale();
      amax_b[g] = 2688 * random_scale();
      factor = double(amax_a[g]) / 2688 * double(amax_b[g]) / 2688;
    }
    operands.a.emplace_back(problem.rows(g), length, [&](int64_t row, int64_t k) {
      return a.draw(problem.bit_a(g, row, k), problem.scale_a(g, row, k)) * factor;
    });
    operands.b.emplace_back(problem.columns(), length, [&](int64_t column, int64_t k) {
      return b.draw(problem.bit_b(g, column, k), problem.scale_b(g, column, k));
    });
    const int64_t depth = problem.kDepth, end = ceil_div(length, depth) * depth;
    const bool tokens = problem.wgrad();
    for (int64_t k = length; k < end; ++k) {
      for (int64_t row = 0; row < problem.rows(g); ++row) a.pad_scale(problem.scale_a(g, row, k));
      for (int64_t column = 0; column < problem.columns(); ++column) b.pad_scale(problem.scale_b(g, column, k));
    }
    const int64_t last = tokens ? ceil_div(length, 128 / A::kBits) * (128 / A::kBits) : length;
    for (int64_t k = length; k < last; ++k) {
      for (int64_t row = 0; row < in.n; ++row) a.set(problem.bit_a(g, row, k), 0);
      for (int64_t column = 0; column < in.k; ++column) b.set(problem.bit_b(g, column, k), 0);
    }
  }
  const auto launch_codes = [&](const GemmArguments& common, auto as) {
    const float* const amaxes[2] = {A::kSmall ? amax_a.data() : nullptr, A::kSmall ? amax_b.data() : nullptr};
    return launch(ScaledGemmArguments{common, problem.row_bytes(), problem.row_bytes(), a.scales.data(),
                                      b.scales.data(), amaxes[0], amaxes[1]},
                  as);
  };
  run_and_check<store>(problem, operands, a.codes.data(), b.codes.data(), launch_codes);
}

}  // namespace sim
