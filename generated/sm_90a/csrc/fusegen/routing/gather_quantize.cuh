// Quantises tokens in the rows of their choices: the quantise and amax kernels with a Source that
// reads a row where its token lies. The rows themselves are neither written nor read. A rowwise copy alone is made
// of tokens, where codes of a row need nothing of others: see routing/quantize_tokens.cuh.
//
// Apart, a row is written once and read once or, behind an amax pass, twice: 4 or 6 bytes an element
// of R H, and 2 T H. Here it is read once or twice from where it lies, 256 bytes of a row to a warp
// as in a tensor of rows. A token's rows are far apart: the quantise kernel walks panels of columns
// that the L2 cache holds, so that x comes from memory once. An amax pass reads R H of it.
#pragma once

#include "fusegen/quantize/step.cuh"
#include "fusegen/routing/gather_quantize.h"
#include "fusegen/routing/quantize_tokens.cuh"
#include "fusegen/routing/teams.cuh"

namespace fusegen {

template <class Config>
struct Untransposed;  // quantize/untransposed.cuh

namespace quantizing {

// What the L2 cache holds of x beside the codes that are written; 16 MiB, a third of an H100's, were slower.
inline constexpr int64_t kPanelBytes = int64_t(4) << 20;

// A `QuantizeConfig` whose blocks have 4 tiles beside each other: what comes before the first, the sizes of groups
// and the map, is as long a wait as its rows. 2 and 8 were slower, 8 where rows are of 2048 columns by 5 %. Scales in
// atoms leave no registers for that.
template <class Config>
struct InRuns : Config {
  static constexpr int kColumnTiles = Config::kAtoms ? Config::kColumnTiles : 4;
};

template <class Config>
struct RunsOf {
  using type = InRuns<Config>;
};
template <class Config>
struct RunsOf<Untransposed<Config>> {
  using type = Untransposed<InRuns<Config>>;
};

// `in.x`, [tokens, columns], in rows of slots; what has no slot is zeros.
template <class Element_, int64_t kPanel>
struct GatheredSource {
  using Element = Element_;
  static constexpr int kBlocksPerSm = TensorSource<Element>::kBlocksPerSm;

  GatherRowsArguments rows_of;

  int64_t panel_columns() const {
    return rows_of.tokens > 0 ? kPanel / int64_t(sizeof(Element)) / rows_of.tokens : rows_of.columns;
  }

  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments& in, int64_t row,
                                       int column, int rows) const {
    const int32_t token = token_of(row, rows);
    const bool inside = column < in.columns;
    const auto* const from = static_cast<const Element*>(rows_of.x) + column;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int32_t own = __shfl_sync(kAll, token, r);
      uint2 loaded = make_uint2(0, 0);
      if (inside && own >= 0) {
        loaded = __ldg(reinterpret_cast<const uint2*>(from + own * int64_t(in.columns)));
      }
      values.pairs[r][0] = loaded.x;
      values.pairs[r][1] = loaded.y;
    }
  }

 private:
  // Lane l: whose row the l-th one from `row` on is; -1 where there is none.
  __device__ __forceinline__ int32_t token_of(int64_t row, int rows) const {
    const int lane = int(threadIdx.x) % 32;
    if (lane >= min(rows, kWarpRows)) return -1;
    const auto slots = uint32_t(rows_of.tokens * rows_of.choices);
    const routing::Map row_slot{static_cast<const int32_t*>(rows_of.row_slot), slots};
    const int64_t slot = row_slot.row(row + lane);
    return slot < 0 ? -1 : int32_t(uint32_t(slot) / uint32_t(rows_of.choices));
  }
};

template <class Element, int64_t kPanel>
inline constexpr bool kSharesRows<GatheredSource<Element, kPanel>> = true;

}  // namespace quantizing

template <class Config, int64_t kPanel = quantizing::kPanelBytes>
static Status launch_gather_quantize(const GatherQuantizeArguments& in, Stream& stream) {
  if (!in.quantizes) return {};
  if (in.gather.tokens * in.gather.choices > INT32_MAX) {
    return {static_cast<int>(cudaErrorInvalidValue), "rows of experts: fewer than 2^31 choices"};
  }
  if constexpr (quantizing::kOfTokens<Config>) {
    if (quantizing::is_of_tokens<Config>(in.step)) {
      return quantizing::quantize_tokens<Config>(in.step, in.gather, stream);
    }
  }
  const quantizing::GatheredSource<typename Config::Element, kPanel> source{in.gather};
  return launch_quantize_step<typename quantizing::RunsOf<Config>::type>(in.step, stream, source);
}

}  // namespace fusegen
