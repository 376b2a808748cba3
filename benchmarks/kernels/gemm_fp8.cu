// One FP8 GEMM behind C functions; build.py says which by macros.
#include "fusegen/gemm/launch_fp8.sm90.cuh"

using namespace fusegen;

using Point = Config<TILE_M, TILE_N, TILE_K, TILE_CLUSTER, Schedule::TILE_SCHEDULE,
                     Limits<SHARED_MEMORY, REGISTERS>, TILE_BUFFERS>;

extern "C" int launch(const Fp8GemmArguments* in, Stream* stream, const char** call) {
  const Status status = launch_fp8_gemm<Gemm::KIND, FORMAT_A, FORMAT_B, ELEMENT,
                                        Fp8Scaling::SCALING, Accumulation::ACCUMULATION, Point>(
      *in, *stream);
  *call = status.call;
  return status.code;
}
