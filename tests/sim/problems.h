// A GEMM and its operands, of a case from standard input; every element of its result is compared
// with float64. A program is the header of a family (hopper.h, mma.h) and a list of GEMMs: see
// main_of.
//
// Whatever a kernel must not use is NaN: codes past a row's end and past the last token, scales of
// empty groups, results before they are written, shared memory.
#pragma once

#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <sstream>

#include "device.h"
#include "epilogues.h"
#include "fusegen/gemm/gemm.h"
#include "fusegen/launch/stream.h"
#include "fusegen/sink/stored.cuh"

namespace sim {

using fusegen::DecodedGemmArguments;
using fusegen::EndScale;
using fusegen::Gemm;
using fusegen::GemmArguments;
using fusegen::Status;
using fusegen::Store;
using fusegen::Stream;
using Result = __nv_bfloat16;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline std::mt19937 random_numbers;

inline float random_value() { return std::normal_distribution<float>()(random_numbers); }
inline float random_scale() {
  return std::uniform_real_distribution<float>(0.3f, 3.0f)(random_numbers);
}

constexpr int64_t ceil_div(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

struct Case {
  std::string name;
  int64_t tokens, n, k;
  int sm_count;
  bool bias, scale_per_group;  // the latter where scales are per tensor
  bool leaves;                 // rows that no group has
  std::vector<int64_t> splits;  // none: dense

  bool dense() const { return splits.empty(); }
  int64_t groups() const { return dense() ? 1 : int64_t(splits.size()); }
};

inline bool read_case(std::istream& in, Case* out) {
  int64_t groups;
  if (!(in >> out->name >> out->tokens >> out->n >> out->k >> out->sm_count >> out->bias >>
        out->scale_per_group >> out->leaves >> groups)) {
    return false;
  }
  out->splits.resize(size_t(groups));
  for (int64_t& size : out->splits) in >> size;
  return true;
}

// A tensor that copies may reach, while it lives.
template <class Value>
class Buffer {
 public:
  Buffer(int64_t count, Value fill) : raw_(size_t(count) + 2 * kMargin, fill), count_(count) {
    const uint64_t begin = reinterpret_cast<uint64_t>(raw_.data() + kMargin / 2);
    values_ = reinterpret_cast<Value*>((begin + kAlignment - 1) / kAlignment * kAlignment);
    const uint64_t address = reinterpret_cast<uint64_t>(values_);
    allocations.push_back({address, address + uint64_t(count) * sizeof(Value)});
  }
  Buffer(const Buffer&) = delete;

  Value* data() { return values_; }
  int64_t count() const { return count_; }
  Value& operator[](int64_t i) {
    if (i < 0 || i >= count_) fail("the test itself: index %ld of %ld", long(i), long(count_));
    return values_[i];
  }

 private:
  static constexpr size_t kAlignment = 32, kMargin = 64;
  std::vector<Value> raw_;
  int64_t count_;
  Value* values_;
};

// A GEMM of one case: its extents and the places of its elements, in the layouts that gemm.h
// and gemm_fp8.h describe. Rows and k count from the beginning of a group.
struct Problem {
  Gemm kind;
  Case in;
  std::vector<int64_t> begins, ends;

  Problem(Gemm kind, const Case& in) : kind(kind), in(in) {
    int64_t end = 0;
    for (int64_t g = 0; g < in.groups(); ++g) {
      begins.push_back(end);
      const int64_t wanted = in.dense() ? in.tokens : in.splits[size_t(g)];
      end += std::clamp<int64_t>(wanted, 0, in.tokens - end);
      ends.push_back(end);
    }
  }

  bool wgrad() const { return kind == Gemm::wgrad; }
  bool fprop() const { return kind == Gemm::fprop; }
  int64_t begin(int64_t g) const { return begins[size_t(g)]; }
  int64_t tokens(int64_t g) const { return ends[size_t(g)] - begin(g); }
  int64_t rows(int64_t g) const { return wgrad() ? in.n : tokens(g); }
  int64_t columns() const { return fprop() ? in.n : in.k; }
  int64_t weight_k() const { return fprop() ? in.k : in.n; }
  int64_t k_of(int64_t g) const { return wgrad() ? tokens(g) : weight_k(); }
  int64_t weights() const { return in.groups() * in.n * in.k; }

  // Of a row that no group has: zero, or as it was.
  bool is_rest(double value) const { return in.leaves ? std::isnan(value) : value == 0; }

  int64_t results() const { return wgrad() ? weights() : in.tokens * columns(); }
  int64_t result_at(int64_t g, int64_t row, int64_t column) const {
    return ((wgrad() ? g * in.n : begin(g)) + row) * columns() + column;
  }

  // 16 bits.
  int64_t plain_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? (begin(g) + k) * in.n + row : (begin(g) + row) * weight_k() + k;
  }
  int64_t plain_b(int64_t g, int64_t column, int64_t k) const {
    switch (kind) {
      case Gemm::fprop: return (g * in.n + column) * in.k + k;
      case Gemm::dgrad: return (g * in.n + k) * in.k + column;
      case Gemm::wgrad: return (begin(g) + k) * in.k + column;
    }
    return -1;
  }

  // 8 bits.
  int64_t padded(int64_t g) const { return 32 * (begin(g) / 32 + g); }
  int64_t padded_tokens() const { return 32 * (in.tokens / 32 + in.groups()); }
  int64_t stored_tokens() const { return in.dense() ? in.tokens : padded_tokens(); }
  int64_t pitch() const { return ceil_div(wgrad() ? stored_tokens() : weight_k(), 16) * 16; }
  int64_t pitch_a() const { return pitch(); }
  int64_t pitch_b() const { return pitch(); }
  int64_t codes_a() const { return (wgrad() ? in.n : in.tokens) * pitch(); }
  int64_t codes_b() const { return (wgrad() ? in.k : in.groups() * columns()) * pitch(); }
  int64_t code_a(int64_t g, int64_t row, int64_t k) const {
    return wgrad() ? row * pitch() + padded(g) + k : (begin(g) + row) * pitch() + k;
  }
  int64_t code_b(int64_t g, int64_t column, int64_t k) const {
    return wgrad() ? column * pitch() + padded(g) + k : (g * columns() + column) * pitch() + k;
  }

  // Scales in blocks of 128.
  int64_t token_blocks() const {
    return in.dense() ? ceil_div(in.tokens, 128) : in.tokens / 128 + in.groups();
  }
  int64_t token_block(int64_t g, int64_t k) const { return begin(g) / 128 + g + k / 128; }
  int64_t weight_block(int64_t g, int64_t row, int64_t column) const {
    const int64_t across = ceil_div(in.k, 128);
    return (g * ceil_div(in.n, 128) + row / 128) * across + column / 128;
  }
};

// One group's operand as numbers.
struct Matrix {
  int64_t length;  // of the contraction
  std::vector<double> values;

  template <class Element>
  Matrix(int64_t rows, int64_t length, Element element) : length(length) {
    values.reserve(size_t(rows * length));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < length; ++k) values.push_back(element(row, k));
    }
  }
  const double* row(int64_t index) const { return values.data() + index * length; }
};

struct Operands {
  std::vector<Matrix> a, b;  // per group: [rows, k], [columns, k]
};

// The sum of products and that of their magnitudes.
struct Sum {
  double value = 0, magnitude = 0;

  void add(double term) {
    value += term;
    magnitude += std::fabs(term);
  }
};

// One rounding to 16 bits where results are stored so, and those of fp32 sums: far less than any
// single wrong product.
template <class Stored>
bool is_close(double found, const Sum& wanted, double before) {
  constexpr double kResult = sizeof(Stored) == 2 ? 1.0 / 256 : 0, kSums = 2e-6;
  // What is added in 16 bits was rounded to them by itself.
  const double product = before != 0 ? std::fabs(wanted.value - before) : 0;
  const double bound =
      kResult * (std::fabs(wanted.value) + product) + kSums * wanted.magnitude;
  return std::fabs(found - wanted.value) <= bound;  // NaN is not
}

inline double widened(Result value) { return __bfloat162float(value); }
inline double widened(float value) { return value; }

// `before`: what results are added to.
template <class Stored>
void check_results(const Problem& problem, const Operands& operands, Buffer<Stored>& results,
                   Buffer<Result>& bias, bool has_bias, Buffer<float>& row_scales,
                   const std::vector<float>& before) {
  for (int64_t g = 0; g < problem.in.groups(); ++g) {
    const Matrix &a = operands.a[size_t(g)], &b = operands.b[size_t(g)];
    for (int64_t row = 0; row < problem.rows(g); ++row) {
      for (int64_t column = 0; column < problem.columns(); ++column) {
        Sum sum;
        for (int64_t k = 0; k < a.length; ++k) sum.add(a.row(row)[k] * b.row(column)[k]);
        if (has_bias) {
          const double scale = row_scales.count() > 0 ? row_scales[problem.begin(g) + row] : 1.0f;
          sum.add(scale * __bfloat162float(bias[g * problem.in.n + column]));
        }
        const int64_t at = problem.result_at(g, row, column);
        const double added = before.empty() ? 0 : before[size_t(at)];
        sum.add(added);
        const double found = widened(results[at]);
        if (is_close<Stored>(found, sum, added)) continue;
        fail("group %ld, row %ld, column %ld is %g, not %g", long(g), long(row), long(column),
             found, sum.value);
      }
    }
  }
  if (problem.wgrad()) return;
  for (int64_t i = problem.ends.back() * problem.columns(); i < results.count(); ++i) {
    if (!problem.is_rest(widened(results[i]))) fail("a row that no group has is %g", widened(results[i]));
  }
}

inline void check_status(const Status& status) {
  if (!status.ok()) fail("the launch says: %s", status.call);
}

// Of the bits of all results so far (FNV-1a): equal for kernels that compute the same.
inline uint64_t digest = 0xcbf29ce484222325;

inline void add_to_digest(const void* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    digest = (digest ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3;
  }
}

// Arguments and results that all GEMMs have.
template <Store store = Store::io>
struct Common {
  Buffer<fusegen::Stored<Result, store>> results;
  Buffer<Result> bias;
  Buffer<float> row_scales;  // none: a bias without
  Buffer<int64_t> splits;
  std::vector<float> before;
  bool has_bias;
  GemmArguments arguments;

  Common(const Problem& problem, const void* a, const void* b)
      : results(problem.results(), fusegen::Stored<Result, store>(kNan)),
        bias(problem.in.groups() * problem.in.n, Result(kNan)),
        row_scales(store == Store::scaled_bias ? problem.in.tokens : 0, kNan),
        splits(problem.in.groups(), 0),
        has_bias(problem.fprop() && problem.in.bias) {
    const Case& in = problem.in;
    for (int64_t i = 0; i < bias.count(); ++i) bias[i] = __float2bfloat16(10 * random_value());
    for (int64_t i = 0; i < std::min(problem.ends.back(), row_scales.count()); ++i) {
      row_scales[i] = random_scale();  // those of rows that no group has stay NaN
    }
    std::copy(in.splits.begin(), in.splits.end(), splits.data());
    if constexpr (fusegen::adds(store)) {
      for (int64_t i = 0; i < results.count(); ++i) {
        results[i] = fusegen::Stored<Result, store>(float(10 * random_value()));
        before.push_back(float(widened(results[i])));
      }
    }
    arguments = {a, b, has_bias ? bias.data() : nullptr, results.data(),
                 in.dense() ? nullptr : splits.data(), in.tokens, in.groups(), in.n, in.k,
                 in.sm_count, row_scales.data()};
    arguments.clears = !in.leaves;
  }

  void check(const Problem& problem, const Operands& operands) {
    check_results(problem, operands, results, bias, has_bias, row_scales, before);
    add_to_digest(results.data(), size_t(results.count()) * sizeof(*results.data()));
  }

  // What a kernel with an epilogue gives is, bit for bit, what the expressions give of the results.
  // Rows past the groups are NaN in the other tensor.
  template <class Launch>
  void check_changed(const Problem& problem, Store changing, Launch launch) {
    Buffer<Result> other(results.count(), Result(kNan)), changed(results.count(), Result(kNan));
    const int64_t in_groups = problem.ends.back() * problem.columns();
    for (int64_t i = 0; i < in_groups; ++i) other[i] = __float2bfloat16(random_value());
    GemmArguments with = arguments;
    with.d = changed.data();
    with.epilogue = kEpilogue;
    if (changing == Store::binary) with.epilogue.other = other.data();
    check_status(launch(with));
    for (int64_t i = 0; i < in_groups; ++i) {
      const float expected = __bfloat162float(apart(changing, results[i], other[i]));
      if (widened(changed[i]) == expected) continue;
      fail("element %ld is %g after the epilogue, not %g", long(i), widened(changed[i]), expected);
    }
    for (int64_t i = in_groups; i < results.count(); ++i) {
      if (!problem.is_rest(widened(changed[i]))) fail("rest %ld is %g after the epilogue", long(i), widened(changed[i]));
    }
    add_to_digest(changed.data(), size_t(changed.count()) * sizeof(*changed.data()));
    if (fusegen::has_aux(changing)) check_aux(with, changed, launch);
  }

  // The same where the expression is of halves of rows, and of values of rows.
  template <class Launch>
  void check_gated(const Problem& problem, Store gating, Launch launch) {
    const int64_t columns = problem.in.n / 2, tokens = problem.in.tokens;
    Buffer<float> rows(tokens, kNan);  // those that no group has stay NaN
    for (int64_t row = 0; row < problem.ends.back(); ++row) rows[row] = random_scale();
    Buffer<Result> gated(tokens * columns, Result(kNan));
    GemmArguments with = arguments;
    with.d = gated.data();
    with.epilogue = kEpilogue;
    with.epilogue.other = rows.data();
    check_status(launch(with));
    for (int64_t i = 0; i < gated.count(); ++i) {
      const int64_t row = i / columns, at = row * problem.in.n + i % columns;
      const bool rest = row >= problem.ends.back();
      const Result wanted =
          rest ? Result(0.0f) : gated_apart(results[at], results[at + columns], rows[row]);
      const double found = widened(gated[i]);
      if (rest ? problem.is_rest(found) : found == widened(wanted)) continue;
      fail("row %ld, column %ld is %g after the epilogue, not %g", long(row), long(i % columns),
           found, widened(wanted));
    }
    add_to_digest(gated.data(), size_t(gated.count()) * sizeof(*gated.data()));
    if (fusegen::has_aux(gating)) check_aux(with, gated, launch);
  }

  // Who asks for the result as it was gets all of it, and what else comes out is the same bits.
  template <class Launch>
  void check_aux(GemmArguments with, Buffer<Result>& changed, Launch launch) {
    Buffer<Result> aux(results.count(), Result(kNan)), beside(changed.count(), Result(kNan));
    with.d = beside.data();
    with.epilogue.aux = aux.data();
    check_status(launch(with));
    const auto same = [](Buffer<Result>& one, Buffer<Result>& two) {
      return std::memcmp(one.data(), two.data(), size_t(one.count()) * sizeof(Result)) == 0;
    };
    if (!same(aux, results)) fail("aux is not the result");
    if (!same(beside, changed)) fail("aux changes the result");
  }
};

// Runs a GEMM and checks what it gives; `launch` takes the arguments, and how the kernel stores.
template <Store store, class Launch>
void run_and_check(const Problem& problem, const Operands& operands, const void* a, const void* b,
                   Launch launch) {
  constexpr Store kPlain = fusegen::changes(store) ? Store::io : store;
  Common<kPlain> common(problem, a, b);
  check_status(launch(common.arguments, As<kPlain>()));
  common.check(problem, operands);
  if constexpr (fusegen::is_gated(store)) {
    common.check_gated(problem, store,
                       [&](const GemmArguments& in) { return launch(in, As<store>()); });
  } else if constexpr (fusegen::changes(store)) {
    common.check_changed(problem, store,
                         [&](const GemmArguments& in) { return launch(in, As<store>()); });
  }
}

// Tokens with kChoices slots each, and the slots of rows in any order; every eighth row has none.
struct Tokens {
  static constexpr int64_t kChoices = 3;

  int64_t columns;
  Buffer<__nv_bfloat16> x;
  Buffer<int32_t> row_slot;

  Tokens(int64_t rows, int64_t columns)
      : columns(columns),
        x(ceil_div(rows, kChoices) * columns, __nv_bfloat16(kNan)),
        row_slot(rows, 0) {
    for (int64_t i = 0; i < x.count(); ++i) x[i] = __float2bfloat16(random_value());
    std::vector<int32_t> slots;
    for (int64_t row = 0; row < rows; ++row) slots.push_back(int32_t(row));
    std::shuffle(slots.begin(), slots.end(), random_numbers);
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t none = row % 16 == 0 ? -1 : int32_t(rows);
      row_slot[row] = row % 8 == 0 ? none : slots[size_t(row)];
    }
  }

  // Slots of each group's rows in order, what is none behind them.
  void sort(const Problem& problem) {
    for (int64_t g = 0; g < problem.in.groups(); ++g) {
      auto* const first = reinterpret_cast<uint32_t*>(row_slot.data() + problem.begin(g));
      std::sort(first, first + problem.tokens(g));
    }
  }

  // Only tokens [first, end) have values until what this returns is called.
  std::function<void()> hide(int64_t first, int64_t end) {
    std::vector<__nv_bfloat16> all(x.data(), x.data() + x.count());
    for (int64_t i = 0; i < x.count(); ++i) {
      if (i / columns < first || i / columns >= end) x[i] = __nv_bfloat16(kNan);
    }
    return [this, all] { std::copy(all.begin(), all.end(), x.data()); };
  }

  // An element of the matrix of rows.
  double at(int64_t index) {
    const int64_t slot = row_slot[index / columns];
    if (slot < 0 || slot >= row_slot.count()) return 0;
    return __bfloat162float(x[slot / kChoices * columns + index % columns]);
  }
};

// `launch` takes the arguments, and how the kernel stores; results come out times row_factor(group, row) and
// column_factor(group, column). An operand that is gathered has tokens.
template <Gemm kind, Store store, class RowFactor, class ColumnFactor, class Launch>
void run_16_bits(const Case& in, RowFactor row_factor, ColumnFactor column_factor, Launch launch,
                 Tokens* of_a = nullptr, Tokens* of_b = nullptr) {
  using Element = __nv_bfloat16;
  const Problem problem(kind, in);
  Buffer<Element> a(in.tokens * (problem.fprop() ? in.k : in.n), Element(kNan));
  Buffer<Element> b(problem.wgrad() ? in.tokens * in.k : problem.weights(), Element(kNan));
  const auto draw = [](Element& value) {
    value = __float2bfloat16(random_value());
    return double(__bfloat162float(value));
  };
  Operands operands;
  for (int64_t g = 0; g < in.groups(); ++g) {
    operands.a.emplace_back(problem.rows(g), problem.k_of(g), [&](int64_t row, int64_t k) {
      const int64_t at = problem.plain_a(g, row, k);
      return (of_a ? of_a->at(at) : draw(a[at])) * row_factor(g, row);
    });
    operands.b.emplace_back(problem.columns(), problem.k_of(g), [&](int64_t column, int64_t k) {
      const int64_t at = problem.plain_b(g, column, k);
      return (of_b ? of_b->at(at) : draw(b[at])) * column_factor(g, column);
    });
  }
  run_and_check<store>(problem, operands, of_a ? of_a->x.data() : a.data(),
                       of_b ? of_b->x.data() : b.data(), launch);
}

inline double unscaled(int64_t, int64_t) { return 1.0; }

// Amaxes of groups without tokens are NaN.
template <Gemm kind, Store store, bool amaxes, class Launch>
void run_decoded(const Case& in, Launch launch) {
  const Problem problem(kind, in);
  Buffer<float> a(in.groups(), std::numeric_limits<float>::quiet_NaN());
  Buffer<float> b(in.groups(), std::numeric_limits<float>::quiet_NaN());
  for (int64_t g = 0; g < in.groups(); ++g) {
    if (problem.tokens(g) == 0) continue;
    a[g] = 2688 * random_scale();
    b[g] = 2688 * random_scale();
  }
  const auto factor = [&](int64_t g, int64_t) {
    return amaxes && problem.tokens(g) > 0 ? double(a[g]) / 2688 * double(b[g]) / 2688 : 1.0;
  };
  run_16_bits<kind, store>(in, factor, unscaled, [&](const GemmArguments& arguments, auto as) {
    const fusegen::DecodedGemmArguments decoded{arguments, amaxes ? a.data() : nullptr,
                                                amaxes ? b.data() : nullptr};
    return launch(decoded, as);
  });
}

// Scales that one operand leaves for the end; those of groups without tokens are NaN.
template <EndScale end>
struct EndScalesOf {
  Buffer<float> scales;
  int64_t rows;   // of the operand in one group
  bool of_tokens;  // its rows

  EndScalesOf(const Problem& problem, int64_t rows, bool of_tokens)
      : scales(end == EndScale::tensor ? problem.in.groups()
                                       : of_tokens ? problem.in.tokens : problem.in.groups() * rows,
               kNan),
        rows(rows),
        of_tokens(of_tokens) {
    for (int64_t g = 0; g < problem.in.groups(); ++g) {
      const int64_t own = end == EndScale::tensor ? 1 : of_tokens ? problem.tokens(g) : rows;
      if (problem.tokens(g) == 0) continue;
      for (int64_t row = 0; row < own; ++row) scales[place(problem, g, row)] = random_scale();
    }
  }

  int64_t place(const Problem& problem, int64_t g, int64_t row) const {
    if (end == EndScale::tensor) return g;
    return (of_tokens ? problem.begin(g) : g * rows) + row;
  }
  double of(const Problem& problem, int64_t g, int64_t row) {
    if (end == EndScale::none || problem.tokens(g) == 0) return 1.0;
    return scales[place(problem, g, row)];
  }
  const float* data() { return end == EndScale::none ? nullptr : scales.data(); }
};

template <Gemm kind, Store store, EndScale of_a, EndScale of_b, class Launch>
void run_scaled(const Case& in, Launch launch) {
  const Problem problem(kind, in);
  EndScalesOf<of_a> a(problem, in.n, !problem.wgrad());
  EndScalesOf<of_b> b(problem, problem.columns(), false);
  const auto row_factor = [&](int64_t g, int64_t row) { return a.of(problem, g, row); };
  const auto column_factor = [&](int64_t g, int64_t column) { return b.of(problem, g, column); };
  const auto launch_scaled = [&](const GemmArguments& arguments, auto as) {
    return launch(fusegen::DecodedGemmArguments{arguments, nullptr, nullptr, a.data(), b.data()},
                  as);
  };
  run_16_bits<kind, store>(in, row_factor, column_factor, launch_scaled);
}

struct NamedGemm {
  const char* name;
  void (*run)(const Case&);
};

// Runs the GEMM that the command line names on every case; the first fault ends the program. With
// one more word it also prints a digest of the results.
inline int main_of(const std::vector<NamedGemm>& gemms, int count, char** arguments) {
  const std::string wanted = count > 1 ? arguments[1] : "";
  const auto named = [&](const NamedGemm& gemm) { return gemm.name == wanted; };
  const auto gemm = std::find_if(gemms.begin(), gemms.end(), named);
  if (gemm == gemms.end()) fail("no GEMM of this name: '%s'", wanted.c_str());
  int cases = 0;
  for (Case in; read_case(std::cin, &in); ++cases) {
    running = wanted + ", " + in.name;
    allocations.clear();
    tensor_maps.clear();
    random_numbers.seed(unsigned(cases) + 1);
    order_of_threads.seed(unsigned(cases) + 1);
    gemm->run(in);
  }
  std::printf("%d cases\n", cases);
  if (count > 2) std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return 0;
}

}  // namespace sim
