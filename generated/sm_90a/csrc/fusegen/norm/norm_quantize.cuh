// Quantises norms of rows, which themselves are neither written nor read: the elements of a tile are
// normed as they are loaded, and rounded as the norm's kernel stores them.
//
// One kernel reads memory once. Its blocks have work of two kinds: statistics of a few rows, or a tile.
// The tiles of 128 rows, a band, wait until the statistics of all of them are there, which other
// blocks have found some 500 blocks before: rows are read again while the L2 cache still has them,
// whatever their length. A block waits for blocks with lower indices alone. Those are started before
// it, as device-wide scans, too, take for granted, and wait for nothing themselves, or for the like.
// Longer rows than a block holds have a kernel for their statistics, and are read twice.
#pragma once

#include "fusegen/norm/norm.cuh"
#include "fusegen/norm/norm_quantize.h"
#include "fusegen/quantize/step.cuh"

namespace fusegen {

namespace norm {

// Where rows go that are wanted for their statistics alone.
struct DropRows {
  __device__ void put(int64_t, int, const uint4&) const {}
};

}  // namespace norm

namespace quantizing {

template <class Element_>
struct NormSource {
  using Element = Element_;
  static constexpr int kBlocksPerSm = 4;  // that its registers leave room for

  NormArguments norm;  // with memory for the statistics of all rows
  uint32_t* found;     // [bands]: blocks that have left statistics of theirs; nullptr: all are there

  template <class Arguments>
  __device__ __forceinline__ void load(Values<Element>& values, const Arguments& in, int64_t row,
                                       int column, int rows) const {
    const Input input{norm.x, in.columns};
    TensorSource<Element>().load(values, input, row, column, rows);
    const Columns of_lane(norm, min(column, int(in.columns) - kLaneColumns));
    const int lane = threadIdx.x % 32, own = min(lane % kWarpRows, rows - 1);
    float mean = 0.0f, rstd = 0.0f;  // of row `lane`, as far as there are rows
    if (rows > 0) {
      rstd = __ldcg(norm.rstd + row + own);
      if (norm.kind == NormKind::layer) mean = __ldcg(norm.mean + row + own);
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float row_mean = __shfl_sync(kAll, mean, r), row_rstd = __shfl_sync(kAll, rstd, r);
      if (r >= rows || column >= in.columns) continue;  // zeros
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2];
        row::widen(values.pairs[r][i], pair, Element());
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          pair[c] = (pair[c] - row_mean) * row_rstd * of_lane.gamma[2 * i + c] +
                    of_lane.bias[2 * i + c];
        }
        values.pairs[r][i] = round_pair(pair[0], pair[1], Element());
      }
    }
  }

 private:
  struct Input {
    const void* input;
    int64_t columns;
  };

  // Of a lane's columns. Minus zero changes nothing that it is added to, not even zeros, and zero
  // does: a layer norm adds that where it has no bias.
  struct Columns {
    float gamma[kLaneColumns], bias[kLaneColumns];

    __device__ __forceinline__ Columns(const NormArguments& norm, int column) {
      const bool centred = norm.kind == NormKind::layer;
      load(norm.weight, column, gamma, 0.0f);
      load(norm.bias, column, bias, centred ? 0.0f : -0.0f);
      const float added = norm.weight == nullptr || norm.zero_centered ? 1.0f : 0.0f;
#pragma unroll
      for (float& each : gamma) each += added;
    }

    __device__ __forceinline__ static void load(const void* from, int column,
                                                float (&to)[kLaneColumns], float otherwise) {
      if (from == nullptr) {
#pragma unroll
        for (float& each : to) each = otherwise;
        return;
      }
      const auto* const at =
          reinterpret_cast<const uint2*>(static_cast<const Element*>(from) + column);
      const uint2 pairs = __ldg(at);
      row::widen(pairs.x, to, Element());
      row::widen(pairs.y, to + 2, Element());
    }
  };
};

// What the blocks of a launch do, in the order of their indices: statistics of the first bands, then of
// one more before the tiles of each.
struct Bands {
  static constexpr int kLead = 512;  // blocks between statistics and their tiles: as many as are there

  int32_t count;    // of bands
  int32_t shares;   // blocks that find statistics of one
  int32_t tiles;    // blocks that quantise one
  int32_t lead;     // bands whose statistics come first

  Bands(int64_t count, int64_t shares, int64_t tiles)
      : count(int32_t(count)), shares(int32_t(shares)), tiles(int32_t(tiles)) {
    lead = int32_t(min(count, (kLead + shares + tiles - 1) / (shares + tiles)));
  }

  int64_t blocks() const { return int64_t(count) * (shares + tiles); }

  struct Work {
    int32_t band, index;  // the band, and which of its shares or of its tiles
    bool tile;
  };

  __device__ Work work(int32_t block) const {
    const int32_t first = lead * shares, both = (count - lead) * (shares + tiles);
    if (block < first) return {block / shares, block % shares, false};
    block -= first;
    if (block >= both) return {count - lead + (block - both) / tiles, (block - both) % tiles, true};
    const int32_t band = block / (shares + tiles), index = block % (shares + tiles);
    if (index < shares) return {band + lead, index, false};
    return {band, index - shares, true};
  }
};

// Statistics of the rows of a share.
template <class Element>
__device__ __forceinline__ void find_statistics(const NormArguments& in, int64_t first, int share) {
  norm::with_short_shape(in.columns, [&](auto shape) {
    using S = decltype(shape);
    const norm::Place<S> place;
    const int columns = int(in.columns);
    const int64_t row = first + share * S::kRows + place.row;
    uint4 x[S::kVectors];
    norm::load_row<Element, S>(x, in.x, row * columns, columns, row < in.rows, place);
    const float count = norm::count_of(in.kind, columns);
    const auto leave = [&](auto centred) {
      using Found = norm::Statistics<S, decltype(centred)::value>;
      const Found found = Found::template of<Element>(x, columns, count, in.eps, place);
      if (row < in.rows) found.store(in, row, place);
    };
    if (in.kind == NormKind::layer) {
      leave(std::true_type());
    } else {
      leave(std::false_type());
    }
  });
}

// What the block has written can be seen by those that have waited for it.
__device__ __forceinline__ void announce(uint32_t* found) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(found, 1u);
}

__device__ __forceinline__ void wait_until(const uint32_t* found, uint32_t count) {
  if (threadIdx.x == 0) {
    while (*const_cast<const volatile uint32_t*>(found) < count) {
    }
    __threadfence();
  }
  __syncthreads();
}

template <class Config>
static __global__ void __launch_bounds__(kThreads, 3)
    norm_quantize_kernel(const __grid_constant__ QuantizeArguments in,
                         const __grid_constant__ NormSource<typename Config::Element> source,
                         const __grid_constant__ Bands bands) {
  static_assert(kThreads == norm::kShortThreads);
  __shared__ Shared<Config> shared;
  wait_for_previous_kernel();
  const Bands::Work work = bands.work(int32_t(blockIdx.x));
  // From the last one on: what the kernel before has written last is still in the L2 cache.
  const int32_t band = bands.count - 1 - work.band;
  if (!work.tile) {
    find_statistics<typename Config::Element>(source.norm, int64_t(band) * kTileRows, work.index);
    announce(source.found + band);
    return;
  }
  wait_until(source.found + band, uint32_t(bands.shares));
  const RowGroups groups{nullptr, int32_t(in.rows), int32_t(in.groups)};
  tile_slices(groups, work_space<Config>(in), band, shared.slices);
  constexpr int kColumns = Config::kColumnTiles * kTileColumns;
  int32_t column = work.index * kColumns;
#pragma unroll 1
  while (true) {
    TileQuantizer<Config>(in, groups, band, column, shared).run(source, column % kColumns == 0);
    column += kTileColumns;
    if (column % kColumns == 0 || column >= in.columns) return;
    __syncthreads();  // the tile's codes have been copied
  }
}

// Rows of whom a block finds the statistics at once.
inline int64_t rows_of_share(int64_t columns) {
  return norm::with_short_shape(columns, [](auto shape) { return int64_t(decltype(shape)::kRows); });
}

}  // namespace quantizing

// Of a norm: with its statistics, unless those are there already.
template <class Config, class Element>
static Status launch_quantize(const QuantizeArguments& in, Stream& stream,
                              const quantizing::NormSource<Element>& source) {
  using namespace quantizing;
  if (source.found == nullptr) return launch_quantize<Config, NormSource<Element>>(in, stream, source);
  if (Status status = check_quantize<Config>(in); !status.ok()) return status;
  constexpr int64_t kColumns = Config::kColumnTiles * kTileColumns;
  const RowGroups groups{nullptr, int32_t(in.rows), 1};
  const Bands bands(row_tiles(groups, work_space<Config>(in)),
                    kTileRows / rows_of_share(in.columns), (in.columns + kColumns - 1) / kColumns);
  if (bands.count > in.rows / kTileRows + 1 || bands.blocks() > INT32_MAX) {
    return {static_cast<int>(cudaErrorInvalidValue), "a copy with bands of no rows, or too many"};
  }
  ClearArguments clear{};
  clear.buffers[0] = reinterpret_cast<float*>(source.found);
  clear.counts[0] = bands.count;
  if (Status status = launch_clear(clear, stream); !status.ok()) return status;
  return launch_kernel("cudaLaunchKernelEx(norm_quantize)", &norm_quantize_kernel<Config>,
                       Grid{dim3(unsigned(bands.blocks())), kThreads}, stream, in, source, bands);
}

template <class Config>
static Status launch_norm_quantize(const NormQuantizeArguments& in, Stream& stream) {
  using Element = typename Config::Element;
  NormArguments rows = in.norm;
  if (rows.mean == nullptr) rows.mean = in.statistics;
  if (rows.rstd == nullptr) rows.rstd = in.statistics + rows.rows;
  auto* const found = reinterpret_cast<uint32_t*>(in.statistics + 2 * rows.rows);
  const bool at_once = in.quantizes && rows.rows > 0 && rows.columns <= norm::kShortColumns;
  if (!at_once) {
    const norm::LoadRows<Element> from{rows.x};
    const Status status = norm::launch<Element>("cudaLaunchKernelEx(statistics of rows)", rows, from,
                                                norm::DropRows(), stream);
    if (!status.ok() || !in.quantizes) return status;
  }
  const quantizing::NormSource<Element> source{rows, at_once ? found : nullptr};
  return launch_quantize_step<Config>(in.step, stream, source);
}

}  // namespace fusegen
