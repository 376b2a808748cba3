// Teams of threads that have a token each, for what moves rows of 16-byte vectors to and from the rows
// of its choices.
//
// A team is as many threads as a row has vectors, a power of two and 256 at most; rows that are longer
// take it several times along. All threads of a token read the same places of the maps, from the L1
// cache.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace routing {

inline constexpr int kTeamThreads = 256;  // of a block

struct Teams {
  int64_t vectors;  // of a row
  int size;         // threads of a token, a power of two

  explicit Teams(int64_t columns) : vectors(columns / row::kVector), size(8) {
    while (size < vectors && size < kTeamThreads) size *= 2;
  }

  int64_t blocks(int64_t tokens) const { return ceil_div(tokens, kTeamThreads / size); }

  __device__ __forceinline__ int lane() const { return int(threadIdx.x) & (size - 1); }

  __device__ __forceinline__ int64_t token() const {
    return int64_t(blockIdx.x) * (kTeamThreads / size) + int(threadIdx.x) / size;
  }
};

// Rows of a map: where they are, and how many there may be. What is no row is -1.
struct Map {
  const int32_t* places;
  uint32_t rows;

  __device__ __forceinline__ int64_t row(int64_t slot) const {
    const int32_t found = __ldg(places + slot);
    return uint32_t(found) < rows ? found : -1;
  }
};

// A kernel with a team for each token.
template <class Arguments, class... Rest>
Status launch_teams(const char* call, void (*kernel)(Arguments, Teams, Rest...),
                    const Arguments& in, Stream& stream, const Rest&... rest) {
  if (in.tokens * in.choices > INT32_MAX) {
    return {cudaErrorInvalidValue, "rows of experts: fewer than 2^31 choices"};
  }
  const Teams teams(in.columns);
  if (in.tokens == 0 || teams.vectors == 0) return {};
  const int64_t blocks = teams.blocks(in.tokens);
  return launch_kernel(call, kernel, Grid{dim3(unsigned(blocks)), kTeamThreads}, stream, in, teams,
                       rest...);
}

}  // namespace routing

}  // namespace fusegen
