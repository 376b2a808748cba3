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

// Launches the kernel of a row's team: `once` where a team has all of a row at once, `twice` where
// rows are longer; each is called with a team and gives a kernel, which takes the arguments and the
// number of rows. Threads have `kVectors` vectors of each operand.
template <int kVectors, class Arguments, class Once, class Twice>
Status launch_rows(const char* call, const Arguments& in, int64_t rows, Stream& stream, Once once,
                   Twice twice) {
  using Widest = row::Team<kWidest / (kVectors * row::kVector)>;
  const Status status = check_sizes(rows, in.columns);
  if (!status.ok() || rows == 0) return status;
  const auto launched = [&](auto team, auto kernel) {
    using Team = decltype(team);
    const Grid grid{dim3(unsigned(Team::ctas(rows))), Team::kCta};
    return launch_kernel(call, kernel(team), grid, stream, in, rows);
  };
  if (in.columns <= width<row::Team<32>>(kVectors)) return launched(row::Team<32>(), once);
  if (in.columns <= width<row::Team<128>>(kVectors)) return launched(row::Team<128>(), once);
  if (in.columns <= width<row::Team<256>>(kVectors)) return launched(row::Team<256>(), once);
  if (in.columns <= kWidest) return launched(Widest(), once);
  return launched(Widest(), twice);
}

}  // namespace softmax

}  // namespace fusegen
