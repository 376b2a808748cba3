// Several tensors quantised in one launch: a block of threads finds its tensor by its number, and
// does there what it does in a launch of that tensor alone.
//
// Tensors are walked from the last to the first, as the tiles of each are: what a plan names first,
// the kernel after this one reads first, and the L2 cache still holds it.
#pragma once

#include "fusegen/quantize/several.h"
#include "fusegen/quantize/quantize.cuh"
#include "fusegen/quantize/state.cuh"
#include "fusegen/quantize/step.cuh"

namespace fusegen {

namespace quantizing {

struct SeveralTensors {
  static constexpr int kMost = QuantizeSeveralArguments::kMost;
  QuantizeArguments tensors[kMost];
  uint32_t begins[kMost];         // the first block of each; of one that is not there, past all
  uint32_t column_blocks[kMost];  // beside each other
};

// Where a block works in the tensor that it belongs to, whose blocks are numbered as those of a
// launch of its own follow each other.
struct PlaceAmongSeveral {
  const QuantizeArguments& in;
  uint32_t block, column_blocks;

  __device__ __forceinline__ explicit PlaceAmongSeveral(const SeveralTensors& all)
      : PlaceAmongSeveral(all, gridDim.x - 1 - blockIdx.x) {}

  __device__ __forceinline__ int32_t row_tile() const {
    return int32_t(super_row() * kSuperRow + block % kSuperRow);
  }
  __device__ __forceinline__ uint32_t column_block() const {
    return block / kSuperRow - super_row() * column_blocks;
  }

 private:
  __device__ __forceinline__ PlaceAmongSeveral(const SeveralTensors& all, uint32_t of_all)
      : PlaceAmongSeveral(all, of_all, tensor_of(all, of_all)) {}
  __device__ __forceinline__ PlaceAmongSeveral(const SeveralTensors& all, uint32_t of_all, int tensor)
      : in(all.tensors[tensor]),
        block(of_all - all.begins[tensor]),
        column_blocks(all.column_blocks[tensor]) {}

  __device__ __forceinline__ static int tensor_of(const SeveralTensors& all, uint32_t of_all) {
    int tensor = 0;
#pragma unroll
    for (int i = 1; i < SeveralTensors::kMost; ++i) tensor += of_all >= all.begins[i];
    return tensor;
  }

  __device__ __forceinline__ uint32_t super_row() const {
    return block / kSuperRow / column_blocks;
  }
};

template <class Config, class Source>
Status launch_several_tiles(const QuantizeArguments (&tensors)[SeveralTensors::kMost], int count,
                          Stream& stream, const Source& source) {
  constexpr int64_t kMostBlocks = 0x7FFFFFFF;
  SeveralTensors in{};
  int64_t blocks = 0;
  for (int i = 0; i < SeveralTensors::kMost; ++i) {
    in.begins[i] = i < count ? uint32_t(blocks) : UINT32_MAX;
    if (i >= count) continue;
    if (Status status = check_quantize<Config>(tensors[i]); !status.ok()) return status;
    const TileGrid grid = tile_grid<Config::kColumnTiles * kTileColumns>(
        tensors[i], work_space<Config>(tensors[i]));
    in.tensors[i] = tensors[i];
    in.column_blocks[i] = uint32_t(grid.column_tiles);
    blocks += kSuperRow * grid.super_rows * grid.column_tiles;
    if (blocks > kMostBlocks) {
      return {static_cast<int>(cudaErrorInvalidValue), "at most 2^31 - 1 tiles of 128 rows"};
    }
  }
  return launch_kernel("cudaLaunchKernelEx(quantize several)",
                       &quantize_kernel<Config, Source, PlaceAmongSeveral, SeveralTensors>,
                       Grid{dim3(unsigned(blocks)), kThreads}, stream, in, source);
}

// Amaxes that a launch raises and nobody else clears are cleared together.
inline Status clear_amaxes(const QuantizeSeveralArguments& in, Stream& stream) {
  static_assert(QuantizeSeveralArguments::kMost <= ClearArguments::kMost);
  ClearArguments clear{};
  bool any = false;
  for (int i = 0; i < in.count; ++i) {
    if (in.steps[i].due != nullptr || in.steps[i].amax == nullptr) continue;
    clear.buffers[i] = in.steps[i].amax;
    clear.counts[i] = in.steps[i].quantize.groups;
    any = true;
  }
  return any ? launch_clear(clear, stream) : Status{};
}

template <class Config>
QuantizeArguments one_of_several(const QuantizeStepArguments& in) {
  if (!Config::Scaling::kTensor) return in.quantize;
  if (in.due != nullptr) return by_history(in);
  QuantizeArguments out = in.quantize;
  out.folded_amax = in.amax;
  return out;
}

}  // namespace quantizing

template <class Config, class Source = TensorSource<typename Config::Element>>
static Status launch_quantize_several(QuantizeSeveralArguments in, Stream& stream,
                                    const Source& source = {}) {
  using namespace quantizing;
  static_assert(!Config::Scaling::kRow && Config::kRule != Rule::nvfp4, "amaxes come first");
  if (in.count < 1 || in.count > QuantizeSeveralArguments::kMost) {
    return {static_cast<int>(cudaErrorInvalidValue), "1 to 4 steps"};
  }
  QuantizeArguments tensors[SeveralTensors::kMost] = {};
  for (int i = 0; i < in.count; ++i) {
    settle_wanted(in.steps[i]);
    tensors[i] = one_of_several<Config>(in.steps[i]);
  }
  Status status = clear_amaxes(in, stream);
  if (status.ok()) status = launch_several_tiles<Config>(tensors, in.count, stream, source);
  for (int i = 0; i < in.count && status.ok(); ++i) {
    if (in.steps[i].due != nullptr) status = move_state(in.steps[i], stream);
    if (status.ok() && in.steps[i].sums != nullptr) status = sum_rows<Config>(in.steps[i], stream);
  }
  return status;
}

}  // namespace fusegen
