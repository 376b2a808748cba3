// Which team has a row, by its length, and what sizes there may be.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusegen/launch/launch.cuh"
#include "fusegen/reduce/row.cuh"

namespace fusegen {

namespace softmax {

// Elements of a row that a team has at once, `vectors` of 16 bytes a thread.
template <class Team>
constexpr int64_t width(int vectors) {
  return int64_t(vectors) * Team::kSize * row::kVector;
}

inline constexpr int64_t kWidest = 16384;  // of rows that are read once

inline Status check_sizes(int64_t rows, int64_t columns) {
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  if (rows < 0 || rows > INT32_MAX) return {kInvalid, "0 <= rows < 2^31"};
  if (columns < row::kVector || columns > INT32_MAX || columns % row::kVector != 0) {
    return {kInvalid, "columns: a multiple of 8, fewer than 2^31"};
  }
  return {};
}

// Launches the kernel of a row's team, the smallest of `kThreads`, twice that and so on that has all
// of a row at once: `once`; or `twice` where rows are longer than any. Each is called with a team and
// gives a kernel, which takes the arguments and the number of rows. Threads have `kVectors` vectors
// of each operand; a team with half of them idle would have half of the bytes in flight.
template <int kVectors, int kThreads = row::kWarp, class Arguments, class Once, class Twice>
Status launch_rows(const char* call, const Arguments& in, int64_t rows, Stream& stream, Once once,
                   Twice twice) {
  using Team = row::Team<kThreads>;
  const Status status = check_sizes(rows, in.columns);
  if (!status.ok() || rows == 0) return status;
  const Grid grid{dim3(unsigned(Team::ctas(rows))), Team::kCta};
  if (in.columns <= width<Team>(kVectors)) {
    return launch_kernel(call, once(Team()), grid, stream, in, rows);
  }
  if constexpr (width<Team>(kVectors) < kWidest) {
    return launch_rows<kVectors, 2 * kThreads>(call, in, rows, stream, once, twice);
  } else {
    return launch_kernel(call, twice(Team()), grid, stream, in, rows);
  }
}

}  // namespace softmax

}  // namespace fusegen
