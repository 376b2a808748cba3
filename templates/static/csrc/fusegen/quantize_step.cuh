// A quantise step: amaxes where scales span more than a tile, the quantise kernel, and the state of
// delayed scaling after it. Each is a kernel of its own, in the order of the stream.
#pragma once

#include "amax_sm90.cuh"
#include "quantize_sm90.cuh"
#include "quantize_state.cuh"
#include "quantize_step.h"

namespace fusegen {

namespace quantizing {

inline AmaxArguments amax_arguments(const QuantizeArguments& in) {
  AmaxArguments out{};
  out.input = in.input;
  out.split_sizes = in.split_sizes;
  out.rows = in.rows;
  out.columns = in.columns;
  out.groups = in.groups;
  return out;
}

// Rows of the whole input: those of all matrices where there are several.
inline int64_t all_rows(const QuantizeArguments& in) {
  return in.split_sizes != nullptr ? in.rows : in.rows * in.groups;
}

// One scale per group, from the group's own amax.
template <class Config>
Status quantize_current(QuantizeStepArguments in, cudaStream_t stream) {
  ClearArguments clear{};
  clear.buffers[0] = in.amax;
  clear.counts[0] = in.quantize.groups;
  if (Status status = launch_clear(clear, stream); !status.ok()) return status;
  AmaxArguments amax = amax_arguments(in.quantize);
  amax.of_group = in.amax;
  Status status = launch_amax<typename Config::Element>(amax, stream);
  if (!status.ok()) return status;
  in.quantize.rowwise.amax = in.amax;
  in.quantize.columnwise.amax = in.amax;
  return launch_quantize<Config>(in.quantize, stream);
}

// One scale per group, from a history that this step's amax joins.
template <class Config>
Status quantize_delayed(QuantizeStepArguments in, cudaStream_t stream) {
  ClearArguments clear{};
  clear.buffers[0] = in.amax;
  clear.counts[0] = in.quantize.groups;
  if (Status status = launch_clear(clear, stream); !status.ok()) return status;
  in.quantize.scale = in.scale;
  in.quantize.folded_amax = in.amax;
  Status status = launch_quantize<Config>(in.quantize, stream);
  if (!status.ok() || !in.update) return status;
  DelayedArguments delayed{};
  delayed.history = in.history;
  delayed.scale = in.scale;
  delayed.amax = in.amax;
  delayed.slots = in.slots;
  delayed.groups = in.quantize.groups;
  delayed.max = in.max;
  delayed.margin = in.margin;
  delayed.grouped = in.grouped;
  return launch_delayed(delayed, stream);
}

// One scale per row, and per column of a group.
template <class Config>
Status quantize_rows(QuantizeStepArguments in, cudaStream_t stream) {
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
  Status status = launch_amax<typename Config::Element>(amax, stream);
  if (!status.ok()) return status;
  in.quantize.rowwise.amax = amax.of_row;
  in.quantize.columnwise.amax = amax.of_column;
  return launch_quantize<Config>(in.quantize, stream);
}

}  // namespace quantizing

template <class Config>
static Status launch_quantize_step(const QuantizeStepArguments& in, cudaStream_t stream) {
  if constexpr (Config::kScaling == Scaling::tensor) {
    return in.history != nullptr ? quantizing::quantize_delayed<Config>(in, stream)
                                 : quantizing::quantize_current<Config>(in, stream);
  } else if constexpr (Config::kScaling == Scaling::row) {
    return quantizing::quantize_rows<Config>(in, stream);
  } else {
    static_assert(Config::kBlock >= 32, "scales of two levels need an amax of the group as well");
    return launch_quantize<Config>(in.quantize, stream);
  }
}

}  // namespace fusegen
