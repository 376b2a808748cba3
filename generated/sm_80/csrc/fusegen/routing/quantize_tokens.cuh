// Quantises tokens and stores the codes in the rows of their choices: rowwise copies alone.
//
// Codes of a row follow from its token and, where scales are of groups, from its group. So a token is read
// once, where reading by row would read it `choices` times: 2 T H + R H bytes of the L2 cache, not 3 R H,
// which is what bounds the tiles of quantize/quantize.cuh there. Columnwise copies need rows side by side.
//
// A warp has 1024 columns of a token, 16 to a lane and turn. Which groups rows are in it finds among the first
// rows of all groups, which each block has in shared memory, with the largest magnitudes of groups.
#pragma once

#include "fusegen/quantize/step.cuh"
#include "fusegen/routing/gather_quantize.h"
#include "fusegen/routing/teams.cuh"

namespace fusegen {

namespace quantizing {

// Whether codes of a row need nothing of other rows: scales are given for groups, or of blocks of a row.
template <class Config>
inline constexpr bool kOfTokens =
    Config::Format::kBits == 8 && !Config::kAtoms &&
    (Config::Scaling::kTensor || (Config::Scaling::kTokenMajor && Config::kBlock == kTileColumns));

inline constexpr int kMostTokenGroups = 2048;  // 16 KiB of shared memory
inline constexpr int kTokenBlocks = 4 * 132;   // all at once on an H100 or H200
inline constexpr int kRun = 16;                // columns of a lane
inline constexpr int kTurns = 2;
inline constexpr int kPartColumns = kTurns * 32 * kRun;  // of a warp

struct GroupTable {
  int32_t begins[kMostTokenGroups + 1];  // first row of each group, and of what is past them
  uint32_t amaxes[kMostTokenGroups];     // fp32
};

// What one block does of all tokens.
template <class Config>
class TokenQuantizer {
  using Element = typename Config::Element;
  using Scaling = typename Config::Scaling;
  static constexpr int kLanes = Scaling::kTensor ? 32 : Config::kBlock / kRun;  // that share a scale

 public:
  __device__ TokenQuantizer(const QuantizeArguments& in, const GatherRowsArguments& rows_of, GroupTable& table)
      : in_(in),
        rows_of_(rows_of),
        groups_{in.group_sizes, int32_t(in.rows), int32_t(in.groups)},
        space_{int32_t(in.row_align), int32_t(in.token_pitch)},
        table_(table),
        lane_(int(threadIdx.x) % 32) {}

  __device__ void run() {
    find_groups();
    let_next_kernel_start();
    if constexpr (Scaling::kTensor) {
      if (blockIdx.x == 0) store_group_scales();
    } else {
      if (in_.token_pitch != 0) pad_scales();
    }
    const auto parts = uint32_t((rows_of_.columns + kPartColumns - 1) / kPartColumns);
    const int64_t all = rows_of_.tokens * parts;
    for (int64_t part = first_warp(); part < all; part += warps()) {
      const auto token = int32_t(uint64_t(part) / parts);
      quantize(token, int32_t(part - int64_t(token) * parts) * kPartColumns);
    }
    if (in_.folded_amax != nullptr) raise_amaxes();
  }

 private:
  __device__ static int64_t first_warp() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
  __device__ static int64_t warps() { return int64_t(gridDim.x) * kWarps; }

  __device__ void find_groups() {
    for (int i = int(threadIdx.x); i < groups_.groups; i += kThreads) table_.amaxes[i] = 0;
    if (threadIdx.x < 32) {
      walk_groups(
          groups_, lane_, [&](int32_t group, int32_t begin, int32_t) { table_.begins[group] = begin; },
          [](int32_t, int32_t) { return false; });
    }
    __syncthreads();
  }

  // The group that has a row, groups() where none has it.
  __device__ int32_t group_of(int32_t row) const {
    int32_t group = 0;
    for (int32_t step = kMostTokenGroups; step > 0; step /= 2) {
      if (group + step <= groups_.groups && table_.begins[group + step] <= row) group += step;
    }
    return group;
  }

  __device__ void store_group_scales() const {
    if (in_.rowwise.scale == nullptr) return;
    for (int i = int(threadIdx.x); i < groups_.groups; i += kThreads) {
      static_cast<float*>(in_.rowwise.scale)[i] = 1.0f / in_.scale[i];
    }
  }

  // Scales of no rows: behind those of each group, and of what is past them.
  __device__ void pad_scales() const {
    const int blocks = int(in_.columns + Config::kBlock - 1) / Config::kBlock;
    for (int64_t group = first_warp(); group <= groups_.groups; group += warps()) {
      const auto at = int32_t(group);
      const bool past = at == groups_.groups;
      const int32_t begin = table_.begins[at], end = past ? begin : table_.begins[at + 1];
      const int32_t first = start_of(begin, at, space_) + end - begin;
      const int32_t next = past ? ragged_extent(groups_, space_) : start_of(end, at + 1, space_);
      for (int block = 0; block < blocks; ++block) {
        float* const scales = static_cast<float*>(in_.rowwise.scale) + block * in_.token_pitch;
        for (int32_t place = first + lane_; place < next; place += 32) scales[place] = 1.0f;
      }
    }
  }

  // A row that a token is quantised for, its group and where its scales lie; -1 where there is none. Lane l has
  // that of choice `first` + l, and whether the row of that slot's own number is nobody's.
  struct Choice {
    int32_t row, group, place;
    bool empty;
  };
  __device__ Choice choice_of(int32_t token, int32_t first) const {
    const int32_t choice = first + lane_;
    if (choice >= rows_of_.choices) return {-1, -1, -1, false};
    const auto slots = uint32_t(rows_of_.tokens * rows_of_.choices);
    const routing::Map slot_row{static_cast<const int32_t*>(rows_of_.slot_row), slots};
    const routing::Map row_slot{static_cast<const int32_t*>(rows_of_.row_slot), slots};
    const int64_t slot = int64_t(token) * rows_of_.choices + choice;
    const auto row = int32_t(slot_row.row(slot));
    const int32_t group = row < 0 ? groups_.groups : group_of(row);
    const bool placed = group < groups_.groups;
    const bool empty = row_slot.row(slot) < 0 || group_of(int32_t(slot)) == groups_.groups;
    return {placed ? row : -1, group, placed ? place_of_row(row, group) : -1, empty};
  }

  // Where a row's scales of blocks lie: behind those of the rows before it, or of the places.
  __device__ int32_t place_of_row(int32_t row, int32_t group) const {
    if (in_.token_pitch == 0) return row;
    const int32_t begin = table_.begins[group];
    return start_of(begin, group, space_) + row - begin;
  }

  struct Loaded {
    uint32_t pairs[kRun / 2];
  };

  // 16 columns of a token, of which the last 8 may be past the end.
  __device__ Loaded load(int32_t token, int32_t column) const {
    const auto* from = static_cast<const Element*>(rows_of_.x) + token * rows_of_.columns + column;
    uint4 halves[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i * kRun / 2 < rows_of_.columns) halves[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
    return {{halves[0].x, halves[0].y, halves[0].z, halves[0].w, halves[1].x, halves[1].y, halves[1].z, halves[1].w}};
  }

  __device__ void quantize(int32_t token, int32_t first_column) {
    Loaded loaded[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) loaded[turn] = load(token, column_of(first_column, turn));
    for (int32_t first = 0; first < rows_of_.choices; first += 32) {
      const Choice own = choice_of(token, first);
      const auto count = int32_t(rows_of_.choices - first < 32 ? rows_of_.choices - first : 32);
      const int32_t slot = int32_t(int64_t(token) * rows_of_.choices) + first;
      if constexpr (Scaling::kTensor) {
        store_by_groups(loaded, own, count, slot, first_column);
      } else {
        store_by_blocks(loaded, own, count, slot, first_column);
      }
    }
  }

  __device__ int32_t column_of(int32_t first_column, int turn) const {
    return first_column + (turn * 32 + lane_) * kRun;
  }

  // The largest magnitude of lanes that share a scale.
  __device__ float amax_of_lanes(const Loaded& loaded) const {
    uint32_t largest = comparable<Element>(loaded.pairs[0]);
#pragma unroll
    for (int i = 1; i < kRun / 2; ++i) {
      largest = larger_magnitude<Element>(largest, comparable<Element>(loaded.pairs[i]));
    }
    const uint32_t pair = amax_of<Element>(largest);
    float amax = fmaxf(widen_low<Element>(pair), widen_high<Element>(pair));
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, distance));
    }
    return amax;
  }

  __device__ uint4 encode(const Loaded& loaded, float factor) const {
    float scaled[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) scaled[i] = widen<Element>(loaded.pairs[i / 2], i % 2) * factor;
    uint32_t words[kRun / 4];
    encode_values<Config>(words, scaled, nullptr);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // What is below stores a token's columns in the rows of `count` choices, the first of which is that of `slot`.

  __device__ void store_by_groups(const Loaded (&loaded)[kTurns], const Choice& own, int32_t count, int32_t slot,
                                  int32_t first_column) {
    if (in_.folded_amax != nullptr) {
#pragma unroll
      for (const Loaded& each : loaded) fold(amax_of_lanes(each), own);
    }
    for_each_choice(own, count, [&](int32_t i, int32_t row, bool empty) {
      const int32_t group = __shfl_sync(kAll, own.group, i);
      const float factor = row < 0 ? 0.0f : __ldg(in_.scale + group);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int32_t column = column_of(first_column, turn);
        if (row >= 0) put(encode(loaded[turn], factor), row, column);
        if (empty) put(uint4{}, slot + i, column);
      }
    });
  }

  __device__ void store_by_blocks(const Loaded (&loaded)[kTurns], const Choice& own, int32_t count, int32_t slot,
                                  int32_t first_column) {
    const Scaler<Config> scaler(in_);
    float stored[kTurns];
    uint4 codes[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto scale = scaler(amax_of_lanes(loaded[turn]));
      stored[turn] = scale.stored;
      codes[turn] = encode(loaded[turn], scale.factor);
    }
    put_scales(stored, own, count, first_column);
    for_each_choice(own, count, [&](int32_t i, int32_t row, bool empty) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int32_t column = column_of(first_column, turn);
        if (row >= 0) put(codes[turn], row, column);
        if (empty) put(uint4{}, slot + i, column);
      }
      if (empty && in_.token_pitch == 0) put_no_scales(slot + i, first_column);
    });
  }

  // Called by whole warps.
  template <class Visit>
  __device__ void for_each_choice(const Choice& own, int32_t count, Visit visit) const {
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      visit(i, __shfl_sync(kAll, own.row, i), __shfl_sync(kAll, int(own.empty), i) != 0);
    }
  }

  __device__ void put(const uint4& codes, int32_t row, int32_t column) const {
    if (column >= rows_of_.columns) return;
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(in_.rowwise.data) + row * in_.rowwise.pitch + column) = codes;
  }

  static constexpr int kBlocks = 32 / kLanes;  // that lanes have in a turn

  // Of all blocks and choices, a lane each at a time: blocks are few, and their lanes would take turns.
  __device__ void put_scales(const float (&stored)[kTurns], const Choice& own, int32_t count,
                             int32_t first_column) const {
    constexpr int kEvery = kTurns * kBlocks;
    for (int32_t first = 0; first < count * kEvery; first += 32) {
      const int32_t block = (first + lane_) % kEvery, choice = (first + lane_) / kEvery;
      float scale = 0.0f;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const float of_turn = __shfl_sync(kAll, stored[turn], block % kBlocks * kLanes);
        if (block / kBlocks == turn) scale = of_turn;
      }
      const int32_t place = __shfl_sync(kAll, own.place, choice % 32);
      if (choice < count && place >= 0) put_scale(scale, place, first_column + block * Config::kBlock);
    }
  }

  __device__ void put_no_scales(int32_t row, int32_t first_column) const {
    if (lane_ < kTurns * kBlocks) put_scale(1.0f, row, first_column + lane_ * Config::kBlock);
  }

  __device__ void put_scale(float scale, int32_t place, int32_t column) const {
    if (column >= rows_of_.columns) return;
    const int32_t block = column / Config::kBlock;
    const int64_t across = (in_.columns + Config::kBlock - 1) / Config::kBlock;
    static_cast<float*>(in_.rowwise.scale)[in_.token_pitch == 0 ? place * across + block
                                                                : block * in_.token_pitch + place] = scale;
  }

  __device__ void fold(float amax, const Choice& own) {
    const uint32_t bits = __float_as_uint(amax);
    if (own.row >= 0 && table_.amaxes[own.group] < bits) atomicMax(table_.amaxes + own.group, bits);
  }

  __device__ void raise_amaxes() {
    __syncthreads();
    for (int i = int(threadIdx.x); i < groups_.groups; i += kThreads) {
      raise(in_.folded_amax + i, __uint_as_float(table_.amaxes[i]));
    }
  }

  const QuantizeArguments& in_;
  const GatherRowsArguments& rows_of_;
  const RowGroups groups_;
  const Space space_;
  GroupTable& table_;
  const int lane_;
};

template <class Config>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_tokens_kernel(const __grid_constant__ QuantizeArguments in,
                           const __grid_constant__ GatherRowsArguments rows_of) {
  __shared__ GroupTable table;
  wait_for_previous_kernel();
  TokenQuantizer<Config>(in, rows_of, table).run();
}

// Whether a step makes the rowwise copy alone, by scales that are there.
template <class Config>
bool is_of_tokens(const QuantizeStepArguments& in) {
  const QuantizeArguments& q = in.quantize;
  const bool scaled = in.due != nullptr || (q.scale != nullptr && in.amax == nullptr);
  return (scaled || !Config::Scaling::kTensor) && q.rowwise.data != nullptr && q.columnwise.data == nullptr &&
         in.sums == nullptr && q.group_sizes != nullptr && q.groups <= kMostTokenGroups;
}

template <class Config>
Status launch_quantize_tokens(const QuantizeArguments& in, const GatherRowsArguments& rows_of, Stream& stream) {
  if (Status status = check_quantize<Config>(in); !status.ok()) return status;
  return launch_kernel("cudaLaunchKernelEx(quantize_tokens)", &quantize_tokens_kernel<Config>,
                       Grid{dim3(kTokenBlocks), kThreads}, stream, in, rows_of);
}

// Of a step that `is_of_tokens`.
template <class Config>
Status quantize_tokens(const QuantizeStepArguments& in, const GatherRowsArguments& rows_of, Stream& stream) {
  if constexpr (Config::Scaling::kTensor) {
    if (in.due != nullptr) {
      const Status status = launch_quantize_tokens<Config>(by_history(in), rows_of, stream);
      return status.ok() ? move_state(in, stream) : status;
    }
  }
  return launch_quantize_tokens<Config>(in.quantize, rows_of, stream);
}

}  // namespace quantizing

}  // namespace fusegen
