// The contraction of one tile by one warpgroup, in one running accumulator.
#pragma once

#include <cstdint>

#include "fusegen/gemm/gemm.h"
#include "fusegen/mainloop/stages.sm90.cuh"
#include "fusegen/mainloop/wgmma.sm90.cuh"

namespace fusegen {

// Keeps one batch of MMAs in flight, so a stage is released one step after its MMAs were issued.
template <class T>
struct RunningSums : StageReader<T> {
  using Base = StageReader<T>;
  using Base::a, Base::b, Base::at, Base::release, Base::stage_offset;
  using Mma = typename T::Mma;
  using Sums = Accumulators<T::kWaves, T::kTileN>;
  using Arguments = const void*;
  static constexpr int kSteps = T::kTileK / T::kMmaK;

  uint32_t previous = 0;  // stage of the batch in flight
  bool in_flight = false;

  __device__ RunningSums(const Base& reader, Arguments, const uint8_t*, uint32_t)
      : Base(reader) {}

  // Of at least one stage. The warpgroup has `rows` rows of the tile, the result `columns` columns
  // from the tile's first on. Calls `issued` when the last MMA is on its way.
  template <class Issued>
  __device__ void run(Sums& d, const Tile& tile, int32_t rows, int32_t columns, Issued issued) {
    if (T::kWaves == 2 && rows <= kMmaRows) {
      run_width<1>(d, tile.k, columns, issued);
    } else {
      run_width<T::kWaves>(d, tile.k, columns, issued);
    }
  }

 private:
  // Column blocks at the right edge take MMAs no wider than they need.
  template <int Used, class Issued>
  __device__ void run_width(Sums& d, int32_t k, int32_t width, Issued issued) {
    if (T::kTileN > 64 && width <= 64) {
      run_stages<Used, T::kTileN < 64 ? T::kTileN : 64>(d, k, issued);
    } else if (T::kTileN > 128 && width <= 128) {
      run_stages<Used, T::kTileN < 128 ? T::kTileN : 128>(d, k, issued);
    } else {
      run_stages<Used, T::kTileN>(d, k, issued);
    }
  }

  // Where the contraction runs over tokens, the last stage gets no more MMA steps than it has
  // tokens for.
  template <int Used, int Width, class Issued>
  __device__ void run_stages(Sums& d, int32_t k, Issued issued) {
    static_assert(kSteps == 4);
    const int last_steps = T::kKind == Gemm::wgrad ? blocks(k, T::kMmaK) % kSteps : 0;
    const int whole = int(blocks(k, T::kTileK)) - (last_steps > 0);
    in_flight = false;
    d.fence();
    for (int i = 0; i < whole; ++i) multiply_stage<Used, Width, kSteps>(d);
    if (last_steps == 1) multiply_stage<Used, Width, 1>(d);
    if (last_steps == 2) multiply_stage<Used, Width, 2>(d);
    if (last_steps == 3) multiply_stage<Used, Width, 3>(d);
    issued();
    wait_for_mmas<0>();
    d.fence();
    release(previous);
  }

  // One stage, or the first `Steps` MMA steps of it. Returns with its MMAs in flight and the stage
  // before it released.
  template <int Used, int Width, int Steps>
  __device__ void multiply_stage(Sums& d) {
    this->wait();
    fence_mmas();
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
      Mma::template step<Used, Width>(d, a + stage_offset() + step * kKStep<T::kMajorA>,
                                      b + stage_offset() + step * kKStep<T::kMajorB>);
    }
    commit_mmas();
    wait_for_mmas<1>();
    if (in_flight) release(previous);
    in_flight = true;
    previous = at.slot;
    at.advance();
  }
};

}  // namespace fusegen
