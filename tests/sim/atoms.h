// A GEMM of codes whose scales lie in atoms, stored as gemm/gemm_scaled.h says.
#pragma once

#include <cuda_fp8.h>

#include "codes.h"
#include "problems.h"

#include "fusegen/gemm/gemm_scaled.h"
#include "fusegen/quantize/scale_atoms.cuh"

namespace sim {

using fusegen::ScaledGemmArguments;

// Codes of 8 bits with E8M0 scales of 32.
template <class Code>
struct MxFormat {
  static constexpr int kBits = 8, kBlock = 32;

  static uint8_t draw(double* value) {
    const Code code(random_value());
    *value = double(float(code));
    return code.__x;
  }
  static uint8_t draw_scale(double* value) {
    const int exponent = int(random_numbers() % 7) - 3;
    *value = std::ldexp(1.0, exponent);
    return uint8_t(127 + exponent);
  }
};

// E2M1 codes with E4M3 scales of 16.
struct NvFormat {
  static constexpr int kBits = 4, kBlock = 16;

  static uint8_t draw(double* value) {
    constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const uint8_t code = uint8_t(random_numbers() % 16);
    *value = code & 8 ? -kValues[code & 7] : kValues[code & 7];
    return code;
  }
  static uint8_t draw_scale(double* value) {
    const __nv_fp8_e4m3 code(random_scale());
    *value = double(float(code));
    return code.__x;
  }
};

// Codes of 8 bits lie in rows, as tensors do; those of 4 bits along the contraction.
template <class Format>
struct AtomPlaces : Problem {
  static constexpr bool kAsRows = Format::kBits == 8;
  static constexpr int kDepth = fusegen::kAtomBlocks * Format::kBlock;

  explicit AtomPlaces(const Problem& problem) : Problem(problem) {}

  // A group's first 128 tokens, in the space that atoms lie in.
  int64_t first(int64_t g) const { return begin(g) / 128 + g; }
  int64_t token_atoms() const { return in.dense() ? ceil_div(in.tokens, 128) : in.tokens / 128 + in.groups(); }
  int64_t length() const {
    return !wgrad() ? weight_k() : in.dense() ? in.tokens : 128 * token_atoms();
  }
  int64_t pitch() const { return ceil_div(length() * Format::kBits, 128) * 16; }
  int64_t pitch_a() const { return kAsRows ? CodesAsRows(*this).pitch_a() : pitch(); }
  int64_t pitch_b() const { return kAsRows ? CodesAsRows(*this).pitch_b() : pitch(); }
  int64_t along() const { return ceil_div(length(), kDepth); }
  int64_t rows_b() const { return ceil_div(columns(), 128); }

  // In elements and in bytes.
  int64_t code_a(int64_t g, int64_t row, int64_t k) const {
    if (kAsRows) return CodesAsRows(*this).code_a(g, row, k);
    const int64_t line = wgrad() ? row : begin(g) + row;
    return line * pitch() * 8 / Format::kBits + (wgrad() ? 128 * first(g) : 0) + k;
  }
  int64_t code_b(int64_t g, int64_t column, int64_t k) const {
    if (kAsRows) return CodesAsRows(*this).code_b(g, column, k);
    const int64_t line = wgrad() ? column : g * columns() + column;
    return line * pitch() * 8 / Format::kBits + (wgrad() ? 128 * first(g) : 0) + k;
  }
  int64_t scale_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? place(row, 128 * first(g) + k) : place(128 * first(g) + row, k);
  }
  int64_t scale_b(int64_t g, int64_t column, int64_t k) const {
    return wgrad() ? place(column, 128 * first(g) + k) : place(128 * g * rows_b() + column, k);
  }
  int64_t codes_a() const {
    return kAsRows ? CodesAsRows(*this).codes_a() : (wgrad() ? in.n : in.tokens) * pitch();
  }
  int64_t codes_b() const {
    return kAsRows ? CodesAsRows(*this).codes_b()
                   : (wgrad() ? 1 : in.groups()) * columns() * pitch();
  }
  int64_t scales_a() const {
    return (wgrad() ? ceil_div(in.n, 128) : token_atoms()) * along() * fusegen::kAtomBytes;
  }
  int64_t scales_b() const {
    return (wgrad() ? 1 : in.groups()) * rows_b() * along() * fusegen::kAtomBytes;
  }

 private:
  int64_t place(int64_t row, int64_t k) const {
    return fusegen::atom_place(row, k / Format::kBlock, along());
  }
};

// Codes and scales of one operand. Of transposed copies what is no code is zero, of others it is
// never read; what is in no block has scale 0.
template <class Format>
struct AtomOperand {
  static constexpr uint8_t kNever = 0x7f;

  Buffer<uint8_t> codes, scales;
  std::vector<double> values;  // of scales that were drawn

  AtomOperand(int64_t code_bytes, int64_t scale_bytes, bool transposed)
      : codes(code_bytes, transposed ? uint8_t(0) : kNever),
        scales(scale_bytes, uint8_t(0)),
        values(size_t(scale_bytes), 0.0) {}

  double draw(int64_t code_at, int64_t scale_at) {
    double value;
    const uint8_t code = Format::draw(&value);
    uint8_t& byte = codes[code_at * Format::kBits / 8];
    if (Format::kBits == 8) {
      byte = code;
    } else {
      const int shift = int(code_at % 2) * 4;
      byte = uint8_t((byte & ~(15 << shift)) | code << shift);
    }
    double& scale = values[size_t(scale_at)];
    if (scale == 0) scales[scale_at] = Format::draw_scale(&scale);
    return value * scale;
  }
};

// `launch` takes the arguments, and how the kernel stores.
template <Gemm kind, Store store, class A, class B, class Launch>
void run_atoms(const Case& in, Launch launch) {
  const AtomPlaces<A> problem{Problem(kind, in)};
  static_assert(A::kBits == B::kBits && A::kBlock == B::kBlock);
  const bool transposed = problem.wgrad() && !problem.kAsRows;
  AtomOperand<A> a(problem.codes_a(), problem.scales_a(), transposed);
  AtomOperand<B> b(problem.codes_b(), problem.scales_b(), transposed);
  Buffer<float> amaxes(in.groups(), kNan);
  Operands operands;
  for (int64_t g = 0; g < in.groups(); ++g) {
    if (problem.tokens(g) > 0) amaxes[g] = 2688 * random_scale();
    const double factor = A::kBits == 4 ? double(amaxes[g]) / 2688 : 1.0;
    operands.a.emplace_back(problem.rows(g), problem.k_of(g), [&](int64_t row, int64_t k) {
      return a.draw(problem.code_a(g, row, k), problem.scale_a(g, row, k)) * factor;
    });
    operands.b.emplace_back(problem.columns(), problem.k_of(g), [&](int64_t column, int64_t k) {
      return b.draw(problem.code_b(g, column, k), problem.scale_b(g, column, k)) * factor;
    });
  }
  const auto launch_atoms = [&](const GemmArguments& common, auto as) {
    const float* const amax = A::kBits == 4 ? amaxes.data() : nullptr;
    return launch(ScaledGemmArguments{common, problem.pitch_a(), problem.pitch_b(), a.scales.data(),
                                      b.scales.data(), amax, amax},
                  as);
  };
  run_and_check<store>(problem, operands, a.codes.data(), b.codes.data(), launch_atoms);
}

}  // namespace sim
