// What the quantise kernels are launched with; host side, no device code.
//
// Rows come in groups: those of `group_sizes` (ragged: input [rows, columns], rows past the last
// group count as zeros), or, where it is null, `groups` matrices of `rows` rows each (weights;
// groups = 1: one dense matrix). Scales decode: value = code * scale. With b rows to a block,
// group g has its first block at begin[g] / b + g of rows / b + groups where ragged, and at
// g * ceil(rows / b) otherwise. Every element of a copy and of its scales is written; what belongs
// to no row is code 0 and scale 1 (E8M0 0, E4M3 0).
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Blocks of threads of an amax launch, at most; each leaves one partial amax of every group it
// meets. Three to an SM.
inline constexpr int kAmaxPartials = 384;

// Stored scales, row-major, by the block of elements that share one in the rowwise copy (`Scaling`
// of quantize/config.cuh; the columnwise copy swaps its two extents), with R all rows, B row blocks
// as above, K columns:
//   all x all  [groups]
//   1 x all    rowwise [R], columnwise [groups, K]
//   1 x b      rowwise [R, ceil(K / b)], columnwise [B, K]
//   b x b      one array [B, ceil(K / b)]

// Rows of the rowwise copy are `pitch` bytes apart. The columnwise copy is transposed: ragged
// [columns, pitch] with group g at row_align * (begin[g] / row_align + g), otherwise
// [groups, columns, pitch]. Pitches are multiples of 16 bytes; padding is written up to 15 bytes
// after a rowwise row, and up to the pitch after a columnwise one. Where instructions read either
// major the columnwise copy lies as the rowwise one does, and its pitch is 0: see untransposed.cuh.
struct QuantizedCopy {
  void* data = nullptr;  // nullptr: this copy is not wanted
  void* scale = nullptr;
  int64_t pitch = 0;
  // What an amax launch left: tensor, nv: partial amaxes [groups, kAmaxPartials]; row: [R],
  // columnwise [groups, columns].
  const float* amax = nullptr;
  float* group_amax = nullptr;  // tensor, nv: result [groups], or nullptr: not wanted
};

struct QuantizeArguments {
  const void* input;
  const int64_t* group_sizes;  // [groups] on the device
  int64_t rows;
  int64_t columns;  // a multiple of 8
  int64_t groups;
  QuantizedCopy rowwise;
  QuantizedCopy columnwise;

  // Rows that groups start at a multiple of in columnwise data: a power of two, at most 128, at
  // least 16 (32 where codes have 4 bits).
  int64_t row_align = 32;
  // Not zero: rowwise fp32 scales of blocks 1 x b are [ceil(columns / b), token_pitch] instead, and
  // rows lie there as in columnwise data.
  int64_t token_pitch = 0;

  float epsilon = 0;               // an amax below it is raised to it
  bool power_of_two = false;       // fp32 scales encode with a power of two, rounded down
  bool round_down = false;         // E8M0 by the OCP rule instead of rounding up
  const float* scale = nullptr;    // tensor: [groups] that encode, in place of an amax
  float* folded_amax = nullptr;    // [groups], raised to the amax of the input
  // Workspace [segments, columns]: see launch_row_sums. A segment is the rows that a tile and a
  // group share; ragged there are at most rows / 128 + 2 * groups + 1, otherwise the tiles of 128
  // rows.
  float* row_sums = nullptr;
  const int64_t* rng_state = nullptr;  // [seed, offset] on the device, for stochastic rounding
};

// Adds the partial sums that a quantise launch left in `row_sums`: output [groups, columns].
struct RowSumArguments {
  const float* row_sums;
  void* output;
  const int64_t* group_sizes;
  int64_t rows;
  int64_t columns;
  int64_t groups;
  int64_t row_align = 32;  // the quantise launch's, or the rows of its blocks if those are more
};

// Largest magnitudes; NaN counts for nothing. nullptr: not wanted. A group's is the largest of its
// partial amaxes, which a quantise launch with the same row_align finds; others must be zero before.
struct AmaxArguments {
  const void* input;
  const int64_t* group_sizes;
  int64_t rows;
  int64_t columns;
  int64_t groups;
  int64_t row_align = 32;
  float* of_group = nullptr;              // [groups, kAmaxPartials]
  float* of_transformed_group = nullptr;  // the same, after the Hadamard transform along rows
  float* of_row = nullptr;                // [R]
  float* of_column = nullptr;             // [groups, columns]
};

// Buffers of floats that are set to zero.
struct ClearArguments {
  static constexpr int kMost = 8;
  float* buffers[kMost] = {};
  int64_t counts[kMost] = {};
  int64_t* rng_state = nullptr;  // its offset is raised by rng_steps
  int64_t rng_steps = 0;
};

// State of delayed scaling that moves on, after everything that quantised with the old scale.
struct DelayedState {
  float* history;  // [slots, groups], the amaxes of this step in slot 0 where not given
  float* scale;    // [groups]
  int64_t slots;
  int64_t groups;
  float max;       // largest value of the format
  int margin = 0;
  bool grouped = false;  // a group whose newest amax is 0 does not roll
  const float* amax = nullptr;  // [groups], the amaxes of this step, where slot 0 is empty
};

struct DelayedArguments {
  static constexpr int kMost = 8;
  static constexpr int kMostSlots = 1024;
  static constexpr int kMostGroups = 0x7FFFFFFF / kMostSlots;  // offsets have 32 bits
  DelayedState states[kMost];
  int count = 0;
};

// What a unit states of histories, as the generator derived it.
template <class Stated>
constexpr bool agrees_history() {
  static_assert(Stated::most_history == DelayedArguments::kMostSlots,
                "most_history: unit against quantize.h");
  return true;
}

// Codes back to 16 bits: matrices of lines.
struct DequantizeArguments {
  const void* data;   // [matrices, lines, pitch bytes]
  // Block b of line l of matrix m: [m * matrix + l * line + b * block]; codes as they are need none.
  const void* scale = nullptr;
  void* output;       // [matrices, lines, length], or transposed [matrices, length, lines]
  int64_t matrices;
  int64_t lines;
  int64_t length;     // elements of a line, a multiple of 8
  int64_t pitch;
  int64_t scale_matrix = 0, scale_line = 0, scale_block = 0;  // strides of scales
  int64_t lines_per_scale = 1;  // 1, or the block where blocks are square
  const float* amax = nullptr;  // [matrices] or [groups]: a scale of the tensor is undone, too
  // Lines of one matrix in groups that have a scale or an amax of their own, or whose scales begin
  // at multiples; lines past all groups are left alone. nullptr: no groups, or none that matter.
  const int64_t* group_sizes = nullptr;  // [groups] on the device
  int64_t groups = 0;
  int64_t scale_group = 0;               // stride of scales
  int64_t row_align = 0;  // groups of scales start at multiples of it; 0: scales follow the lines
};

// The columnwise copy of rows in groups back to 16 bits, rows first again, for a GEMM that runs
// over padded groups: those start where transposed data has them, and end with zeros.
struct DequantizeGroupsArguments {
  const void* data;            // [columns, pitch bytes]
  const void* scale = nullptr;  // of the columnwise copy; codes as they are need none
  void* output;                // [row_align * (rows / row_align + groups), columns]
  const int64_t* group_sizes;  // [groups] on the device
  int64_t* padded_sizes;       // [groups] of the output, or nullptr: not wanted
  int64_t rows;
  int64_t columns;             // a multiple of 8
  int64_t groups;
  int64_t pitch;
  int64_t row_align;
};

}  // namespace fusegen
