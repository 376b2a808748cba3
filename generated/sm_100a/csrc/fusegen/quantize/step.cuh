// A quantise step: amaxes where scales span more than a tile, the quantise kernel, and after it the
// state of delayed scaling and sums over rows. Each is a kernel of its own, in the order of the stream.
#pragma once

#include "fusegen/quantize/amax.cuh"
#include "fusegen/quantize/quantize.cuh"
#include "fusegen/quantize/state.cuh"
#include "fusegen/quantize/step.h"
#include "fusegen/quantize/row_sums.cuh"

namespace fusegen {

namespace quantizing {

inline AmaxArguments amax_arguments(const QuantizeArguments& in) {
  AmaxArguments out{};
  out.input = in.input;
  out.group_sizes = in.group_sizes;
  out.rows = in.rows;
  out.columns = in.columns;
  out.groups = in.groups;
  out.row_align = in.row_align;
  return out;
}

// Rows of the whole input: those of all matrices where there are several.
inline int64_t all_rows(const QuantizeArguments& in) {
  return in.group_sizes != nullptr ? in.rows : in.rows * in.groups;
}

template <class Config, class Source>
Status amax_of_groups(const AmaxArguments& in, Stream& stream, const Source& source) {
  using Element = typename Config::Element;
  if constexpr (Config::kHadamard) {
    if (in.of_transformed_group != nullptr) return launch_amax<Element, true>(in, stream, source);
  }
  return launch_amax<Element, false>(in, stream, source);
}

// One scale per group, from the group's own amax.
template <class Config, class Source>
Status quantize_current(QuantizeStepArguments in, Stream& stream, const Source& source) {
  AmaxArguments amax = amax_arguments(in.quantize);
  amax.of_group = in.partial_amax;
  Status status = launch_amax<typename Config::Element, false>(amax, stream, source);
  if (!status.ok()) return status;
  in.quantize.rowwise.amax = in.partial_amax;
  in.quantize.columnwise.amax = in.partial_amax;
  in.quantize.rowwise.group_amax = in.amax;
  return launch_quantize<Config>(in.quantize, stream, source);
}

// One scale per group that is given; its amax may be wanted.
template <class Config, class Source>
Status quantize_scaled(QuantizeStepArguments in, Stream& stream, const Source& source) {
  if (in.amax != nullptr) {
    ClearArguments clear{};
    clear.buffers[0] = in.amax;
    clear.counts[0] = in.quantize.groups;
    if (Status status = launch_clear(clear, stream); !status.ok()) return status;
  }
  in.quantize.folded_amax = in.amax;
  return launch_quantize<Config>(in.quantize, stream, source);
}

// One scale per group, from a history that the group's amax joins: in its slot 0, which is empty
// between steps, so that nothing has to be cleared.
inline QuantizeArguments by_history(const QuantizeStepArguments& in) {
  QuantizeArguments out = in.quantize;
  out.scale = in.state.scale;
  out.folded_amax = in.update ? in.state.history : nullptr;
  return out;
}

template <class Config, class Source>
Status quantize_delayed(const QuantizeStepArguments& in, Stream& stream, const Source& source) {
  const Status status = launch_quantize<Config>(by_history(in), stream, source);
  return status.ok() ? move_state(in, stream) : status;
}

// One scale per row, and per column of a group.
template <class Config, class Source>
Status quantize_rows(QuantizeStepArguments in, Stream& stream, const Source& source) {
  const bool rowwise = in.quantize.rowwise.data != nullptr;
  const bool columnwise = in.quantize.columnwise.data != nullptr;
  AmaxArguments amax = amax_arguments(in.quantize);
  amax.of_row = rowwise ? in.row_amax : nullptr;
  amax.of_column = columnwise ? in.column_amax : nullptr;
  ClearArguments clear{};
  clear.buffers[0] = amax.of_row;
  clear.counts[0] = rowwise ? all_rows(in.quantize) : 0;
  clear.buffers[1] = amax.of_column;
  clear.counts[1] = columnwise ? in.quantize.groups * in.quantize.columns : 0;
  if (Status status = launch_clear(clear, stream); !status.ok()) return status;
  Status status = launch_amax<typename Config::Element, false>(amax, stream, source);
  if (!status.ok()) return status;
  in.quantize.rowwise.amax = amax.of_row;
  in.quantize.columnwise.amax = amax.of_column;
  return launch_quantize<Config>(in.quantize, stream, source);
}

// Scales of blocks under one of the group, which a transform before the columnwise copy changes; the
// random numbers move on afterwards.
template <class Config, class Source>
Status quantize_two_levels(QuantizeStepArguments in, Stream& stream, const Source& source) {
  const bool rowwise = in.rowwise_amax != nullptr, columnwise = in.columnwise_amax != nullptr;
  const bool transformed = Config::kHadamard && columnwise;
  float* const partials = in.partial_amax;
  AmaxArguments amax = amax_arguments(in.quantize);
  amax.of_group = rowwise || !transformed ? partials : nullptr;
  if (transformed) {
    amax.of_transformed_group = partials + (rowwise ? in.quantize.groups * kAmaxPartials : 0);
  }
  Status status = amax_of_groups<Config>(amax, stream, source);
  if (!status.ok()) return status;
  in.quantize.rowwise.amax = amax.of_group;
  in.quantize.rowwise.group_amax = in.rowwise_amax;
  in.quantize.columnwise.amax = transformed ? amax.of_transformed_group : amax.of_group;
  in.quantize.columnwise.group_amax = in.columnwise_amax;
  in.quantize.rng_state = in.rng_state;
  status = launch_quantize<Config>(in.quantize, stream, source);
  if (!status.ok() || in.rng_state == nullptr || !in.update) return status;
  ClearArguments advance{};
  advance.rng_state = in.rng_state;
  advance.rng_steps = 1;
  return launch_clear(advance, stream);
}

template <class Config>
Status sum_rows(const QuantizeStepArguments& in, Stream& stream) {
  RowSumArguments sums{};
  sums.row_sums = in.quantize.row_sums;
  sums.output = in.sums;
  sums.group_sizes = in.quantize.group_sizes;
  sums.rows = in.quantize.rows;
  sums.columns = in.quantize.columns;
  sums.groups = in.quantize.groups;
  sums.row_align = work_space<Config>(in.quantize).align;
  return launch_row_sums<typename Config::Element>(sums, stream);
}

template <class Config, class Source>
Status quantize_by_scaling(const QuantizeStepArguments& in, Stream& stream, const Source& source) {
  if constexpr (Config::Scaling::kTensor) {
    if (in.due != nullptr) return quantize_delayed<Config>(in, stream, source);
    return in.quantize.scale != nullptr ? quantize_scaled<Config>(in, stream, source)
                                        : quantize_current<Config>(in, stream, source);
  } else if constexpr (Config::Scaling::kRow) {
    return quantize_rows<Config>(in, stream, source);
  } else if constexpr (Config::kRule == Rule::nvfp4) {
    return quantize_two_levels<Config>(in, stream, source);
  } else {
    return launch_quantize<Config>(in.quantize, stream, source);
  }
}

// A copy without elements has no address, which would read as not wanted; its scales may have one.
inline void want_empty(QuantizedCopy& copy) {
  if (copy.data == nullptr) copy.data = copy.scale;
}

// What is wanted has an address, and nothing else has.
inline void settle_wanted(QuantizeStepArguments& in) {
  if (in.quantize.rows == 0) {
    want_empty(in.quantize.rowwise);
    want_empty(in.quantize.columnwise);
  }
  if (in.sums == nullptr) in.quantize.row_sums = nullptr;
}

}  // namespace quantizing

template <class Config, class Source = TensorSource<typename Config::Element>>
static Status launch_quantize_step(QuantizeStepArguments in, Stream& stream,
                                   const Source& source = {}) {
  quantizing::settle_wanted(in);
  const Status status = quantizing::quantize_by_scaling<Config>(in, stream, source);
  return status.ok() && in.sums != nullptr ? quantizing::sum_rows<Config>(in, stream) : status;
}

}  // namespace fusegen
