// What comes with the stages of both operands: nothing, or the scales that the matrix instruction
// reads. Whoever has none is `NoStageScales`; others have
//   kBytes<T>                 of a stage
//   Operands                  what is loaded, besides codes
//   Copies<kind, T>           start(in, tile, shape), copy(stage, left): as OperandCopies do
//   Words<T>                  start(): before the first stage of a tile; advance(): behind each
//                             load(registers, stage, step): those of a warp for one step
#pragma once

#include <cstdint>

#include "fusegen/load/addresses.mma.cuh"
#include "fusegen/tile_source/tile.cuh"

namespace fusegen {

struct NoStageScales {
  using Operands = MmaOperands;
  template <class T>
  static constexpr int kBytes = 0;

  template <Gemm, class T>
  struct Copies {
    __device__ void start(const MmaOperands&, const Tile&, const Shape&) {}
    __device__ void copy(uint32_t, int32_t) {}
  };

  template <class T>
  struct Words {
    struct Registers {};
    __device__ Words(uint32_t, uint32_t, uint32_t) {}
    __device__ void start() {}
    __device__ void advance() {}
    __device__ void load(Registers&, uint32_t, int) const {}
  };

  // One MMA of a row block and a column block.
  template <class Mma, class Registers>
  __device__ static void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b, const Registers&,
                                      int, int) {
    Mma::multiply_add(d, a, b);
  }
};

}  // namespace fusegen
