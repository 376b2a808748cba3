// The GEMMs of sm_90a.
#pragma once

#include "codes.h"
#include "problems.h"

#include "fusegen/gemm/gated_codes.sm90.cuh"
#include "fusegen/gemm/gemm_decoded.sm90.cuh"
#include "fusegen/gemm/gemm_gather.sm90.cuh"
#include "fusegen/gemm/launch_fp8.sm90.cuh"

namespace sim {

using fusegen::Gather;

template <Gemm kind, Store store, class Config>
void run_hopper(const Case& in) {
  run_16_bits<kind, store>(in, unscaled, unscaled, [](const GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_gemm<kind, Result, Config, as.kStore>(arguments, stream, as.change);
  });
}

// The arguments have the slots of rows behind those of the GEMM. Of tokens that arrive the first
// sixth is not there before.
template <Gemm kind, Store store, Gather gather, class Config>
void run_gathered_hopper(const Case& in, bool arrive) {
  Tokens tokens(in.tokens, gather == Gather::b || kind == Gemm::fprop ? in.k : in.n);
  if (arrive) tokens.sort(Problem(kind, in));
  run_16_bits<kind, store>(
      in, unscaled, unscaled,
      [&](const GemmArguments& arguments, auto as) {
        Stream stream;
        const int64_t end = in.tokens / Tokens::kChoices, first = end / 6;
        std::function<void()> come;
        if (arrive) come = tokens.hide(first, end);
        fusegen::Arriving arriving(first, end, reinterpret_cast<int64_t>(arrive ? &come : nullptr));
        const fusegen::GatheredGemmArguments gathered{arguments, tokens.row_slot.data(),
                                                      Tokens::kChoices, &arriving};
        const Status status = fusegen::launch_gathered_gemm<kind, Result, Config, as.kStore, gather>(
            gathered, stream, as.change);
        if (in.tokens > 0 && !arriving.is_all()) fail("nobody waited for tokens");
        if (arrive) come();
        return status;
      },
      gather == Gather::a ? &tokens : nullptr, gather == Gather::b ? &tokens : nullptr);
}

template <Gemm kind, Store store, Gather gather, class Config>
void run_gathered_hopper(const Case& in) {
  for (const bool arrive : {false, true}) run_gathered_hopper<kind, store, gather, Config>(in, arrive);
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

template <Gemm kind, Store store, class A, class B, Fp8Scaling scaling, Accumulation accumulation,
          class Config>
void run_fp8(const Case& in) {
  run_codes<kind, store, A, B, scaling>(in, [](const Fp8GemmArguments& arguments, auto as) {
    Stream stream;
    return fusegen::launch_fp8_gemm<kind, A, B, Result, scaling, accumulation, Config, as.kStore>(
        arguments, stream, as.change);
  });
}

// A gated result in codes, by scales of groups: what a kernel of its own would make of the result.
struct GatedCodesRun {
  using Format = fusegen::E4M3;

  static constexpr int64_t kAlign = 32;
  static constexpr uint8_t kUnwritten = 0xff;

  const Problem problem;
  const int64_t columns, pitch, token_pitch;
  Buffer<uint8_t> codes, columnwise;
  Buffer<float> scales, inverses, columnwise_inverses, amaxes;
  Buffer<Result> halves;

  explicit GatedCodesRun(const Case& in)
      : problem(Gemm::fprop, in),
        columns(in.n / 2),
        pitch(ceil_div(columns, 16) * 16),
        token_pitch(in.dense() ? ceil_div(in.tokens, 16) * 16
                               : kAlign * (in.tokens / kAlign + in.groups())),
        codes(in.tokens * pitch, kUnwritten),
        columnwise(columns * token_pitch, kUnwritten),
        scales(in.groups(), kNan),
        inverses(in.groups(), kNan),
        columnwise_inverses(in.groups(), kNan),
        amaxes(in.groups(), 0.0f),
        halves(in.tokens * in.n, Result(kNan)) {
    for (int64_t g = 0; g < in.groups(); ++g) scales[g] = 16 * random_scale();
  }

  // The same arguments, of a kernel that leaves the halves and codes by columns, too.
  fusegen::GatedCodesArguments arguments(const Fp8GemmArguments& product,
                                         fusegen::DelayedArguments* due) {
    fusegen::GatedCodesArguments out{product, {}};
    out.product.gemm.d = nullptr;
    out.product.gemm.epilogue.aux = halves.data();
    out.step.quantize.rowwise.data = codes.data();
    out.step.quantize.rowwise.scale = inverses.data();
    out.step.quantize.rowwise.pitch = pitch;
    out.step.quantize.columnwise = {columnwise.data(), columnwise_inverses.data(), token_pitch};
    out.step.quantize.row_align = kAlign;
    out.step.state.scale = scales.data();
    out.step.state.history = amaxes.data();
    out.step.due = due;
    out.step.update = true;
    return out;
  }

  // By columns: the same codes, and zeros where no row is.
  void check_columnwise() {
    if (problem.in.tokens == 0) return;
    std::vector<int64_t> row_of(size_t(token_pitch), -1);
    for (int64_t g = 0; g < problem.in.groups(); ++g) {
      const int64_t begin = problem.begin(g), tokens = problem.tokens(g);
      const int64_t first = kAlign * (begin / kAlign + g);  // 0 of a dense one
      for (int64_t i = 0; i < tokens; ++i) row_of[size_t(first + i)] = begin + i;
      if (columnwise_inverses[g] != 1.0f / scales[g]) fail("group %ld has two inverses", long(g));
    }
    for (int64_t i = 0; i < columns * token_pitch; ++i) {
      const int64_t column = i / token_pitch, row = row_of[size_t(i % token_pitch)];
      const uint8_t wanted = row >= 0 ? codes[row * pitch + column] : 0;
      if (columnwise[i] == wanted) continue;
      fail("column %ld has code %u at %ld, not %u", long(column), unsigned(columnwise[i]),
           long(i % token_pitch), unsigned(wanted));
    }
  }

  // Codes are the same where nobody asks for halves, columns or amaxes.
  void check_same(GatedCodesRun& alone) {
    for (int64_t row = 0; row < problem.in.tokens; ++row) {
      for (int64_t at = row * pitch; at < row * pitch + columns; ++at) {
        if (codes[at] != alone.codes[at]) fail("row %ld has other codes without halves", long(row));
      }
    }
  }

  // Checks codes, amaxes and inverses, and leaves what is encoded, and the halves, where 16 bits are asked for.
  void check(const GemmArguments& with) {
    const auto* const rows = static_cast<const float*>(with.epilogue.other);
    auto* const gated = static_cast<Result*>(with.d);
    for (int64_t g = 0; g < problem.in.groups(); ++g) {
      float amax = 0;
      for (int64_t i = 0; i < problem.tokens(g) * columns; ++i) {
        const int64_t row = problem.begin(g) + i / columns, column = i % columns;
        const int64_t at = row * problem.in.n + column;
        const Result value = gated_apart(halves[at], halves[at + columns], rows[row]);
        gated[row * columns + column] = value;
        amax = std::fmax(amax, std::fabs(__bfloat162float(value)));
        const uint32_t wanted = fusegen::encode<Format>(__bfloat162float(value) * scales[g]);
        if (codes[row * pitch + column] == wanted) continue;
        fail("row %ld, column %ld has code %u, not %u", long(row), long(column),
             unsigned(codes[row * pitch + column]), wanted);
      }
      if (problem.in.tokens == 0) continue;
      if (amaxes[g] != amax) fail("group %ld has amax %g, not %g", long(g), amaxes[g], amax);
      if (inverses[g] != 1.0f / scales[g]) fail("group %ld has another inverse", long(g));
    }
    for (int64_t row = problem.ends.back(); row < problem.in.tokens; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        gated[row * columns + column] = Result(0.0f);
        if (codes[row * pitch + column] != 0) fail("row %ld of nobody has a code", long(row));
      }
    }
    if (with.epilogue.aux == nullptr) return;
    std::memcpy(with.epilogue.aux, halves.data(), size_t(halves.count()) * sizeof(Result));
  }
};

template <class Config>
void run_gated_codes(const Case& in) {
  using Code = __nv_fp8_e4m3;
  constexpr Gemm kKind = Gemm::fprop;
  constexpr auto kFast = Accumulation::fast;
  run_codes<kKind, Store::gated_aux, Code, Code, Fp8Scaling::tensor>(
      in, [&](const Fp8GemmArguments& arguments, auto as) {
        Stream stream;
        if constexpr (as.kStore == Store::gated_aux) {
          GatedCodesRun run(in);
          fusegen::DelayedArguments due{};
          using Codes = fusegen::GatedCodes<decltype(as.change), GatedCodesRun::Format>;
          const auto launch = [&](const fusegen::GatedCodesArguments& with) {
            check_status(fusegen::launch_gated_codes<Code, Code, Result, kFast, Config>(
                with, stream, Codes{{as.change}}));
          };
          fusegen::GatedCodesArguments with = run.arguments(arguments, &due);
          launch(with);
          run.check(arguments.gemm);
          run.check_columnwise();
          GatedCodesRun alone(in);
          with.product.gemm.epilogue.aux = nullptr;
          with.step.quantize.rowwise.data = alone.codes.data();
          with.step.quantize.columnwise = {};
          with.step.state.history = nullptr;
          with.step.update = false;
          launch(with);
          run.check_same(alone);
          return Status{};
        } else {
          return fusegen::launch_fp8_gemm<kKind, Code, Code, Result, Fp8Scaling::tensor, kFast,
                                          Config, as.kStore>(arguments, stream, as.change);
        }
      });
}

}  // namespace sim
