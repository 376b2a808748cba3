// What kernels of mma.sync do beside ordinary loads and stores: cp.async, ldmatrix, mma.sync (PTX ISA,
// "Data Movement and Conversion Instructions", "Matrix multiply-accumulate operation using mma").
//
// A copy lands at any time between its issue and the wait for its group: early, so that a stage that
// is still read shows, or late, so that one read too early does. Sums are exact within an MMA and
// fp32 from one to the next.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "copies.h"
#include "matrices.h"

namespace sim {

// ---- cp.async ----

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;  // the rest of 16 is zero

  void land() const {
    std::memset(to, 0, 16);
    std::memcpy(to, from, bytes);
  }
};

// Of one thread: groups that are committed and not waited for, oldest first, and the open one.
struct CopyGroups {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> committed;

  bool empty() const {
    const auto none = [](const std::vector<Copy>& group) { return group.empty(); };
    return open.empty() && std::all_of(committed.begin(), committed.end(), none);
  }
};

inline CopyGroups copies[kMostCtas * kMostThreads];

inline void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  if (bytes > 0) check_global(reinterpret_cast<uint64_t>(from), bytes);
  if (reinterpret_cast<uint64_t>(from) % 16 != 0) fail("cp.async from a misaligned address");
  const Copy copy{shared_pointer(to, 16), static_cast<const uint8_t*>(from), bytes};
  if (order_of_threads() % 2 == 0) {
    copy.land();
  } else {
    copies[cluster.current].open.push_back(copy);
  }
}

inline void commit_copies() {
  CopyGroups& mine = copies[cluster.current];
  mine.committed.push_back(std::exchange(mine.open, {}));
}

inline void wait_for_copies(size_t left) {
  auto& groups = copies[cluster.current].committed;
  for (; groups.size() > left; groups.pop_front()) {
    std::shuffle(groups.front().begin(), groups.front().end(), order_of_threads);
    for (const Copy& copy : groups.front()) copy.land();
  }
}

// A barrier counts this thread when what it copied has landed: by then.
inline void arrive_when_copied(uint32_t address) {
  std::vector<Copy>& mine = copies[cluster.current].open;
  std::shuffle(mine.begin(), mine.end(), order_of_threads);
  for (const Copy& copy : mine) copy.land();
  mine.clear();
  reinterpret_cast<Mbarrier*>(shared_pointer(address, sizeof(Mbarrier)))->arrive();
}

// ---- ldmatrix ----

// Lane 8 i + r gives the address of row r of matrix i; transposed, a lane gets two neighbours of a
// column instead of a row.
template <bool Transposed>
void load_four_matrices(uint32_t address, uint32_t (&values)[4]) {
  for (int i = 0; i < 4; ++i) {
    uint32_t both = 0;
    for (int half = 0; half < 2; ++half) {
      const int row = Transposed ? lane() % 4 * 2 + half : lane() / 4;
      const int column = Transposed ? lane() / 4 : lane() % 4 * 2 + half;
      const uint32_t begin = shuffle(address, i * 8 + row);
      both |= uint32_t(read_as<uint16_t>(shared_pointer(begin, 16) + column * 2)) << half * 16;
    }
    values[i] = both;
  }
}

// ---- mma.sync ----

// A step is 32 bytes of the contraction, whatever its elements are.
struct MmaOperands {
  uint32_t a[4], b[2];

  // Element k of row `row` or of column `column`, by the lane that has it.
  template <Format format>
  static double a_at(const uint64_t* lanes, int row, int k) {
    const int byte = k * bytes_of(format);
    const auto& owner = *reinterpret_cast<const MmaOperands*>(lanes[row % 8 * 4 + byte % 16 / 4]);
    return decode(bytes_from(owner.a[row / 8 + byte / 16 * 2], byte), format);
  }
  template <Format format>
  static double b_at(const uint64_t* lanes, int column, int k) {
    const int byte = k * bytes_of(format);
    const auto& owner = *reinterpret_cast<const MmaOperands*>(lanes[column * 4 + byte % 16 / 4]);
    return decode(bytes_from(owner.b[byte / 16], byte), format);
  }

 private:
  static const uint8_t* bytes_from(const uint32_t& value, int byte) {
    return reinterpret_cast<const uint8_t*>(&value) + byte % 4;
  }
};

// 16 x 8 results: a lane's two columns of each of its two rows.
template <Format format_a, Format format_b>
void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t* b) {
  static_assert(bytes_of(format_a) == bytes_of(format_b));
  const MmaOperands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const uint64_t* const lanes = exchange(reinterpret_cast<uint64_t>(&mine));
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 32 / bytes_of(format_a); ++k) {
      sum += MmaOperands::a_at<format_a>(lanes, row, k) *
             MmaOperands::b_at<format_b>(lanes, column, k);
    }
    d[i] = float(d[i] + sum);
  }
  sync_warp();  // before anybody's operands go
}

// The same of blocks with scales: bytes of each lane, which some of them hand in.
struct ScaledMmaOperands {
  MmaOperands codes;
  uint32_t scale_a, scale_b;

  // Element k of the bytes that a row of A, or a column of B, has at `value`.
  template <Format format>
  static double element(const uint32_t& value, int bit) {
    const uint8_t code = uint8_t(value >> bit % 32 & ((1u << bits_of(format)) - 1));
    return decode(&code, format);
  }
};

// Of 8 bits scales are E8M0, one for all of the contraction; of 4 bits E4M3, one for each 16.
template <Format format>
double scale_of(uint32_t scales, int k) {
  if (format != Format::e2m1) return std::ldexp(1.0, int(scales & 0xff) - 127);
  const uint8_t code = uint8_t(scales >> k / 16 * 8);
  return decode(&code, Format::e4m3);
}

template <Format format_a, Format format_b>
void multiply_scaled(float* d, const uint32_t (&a)[4], const uint32_t* b, uint32_t scale_a, uint32_t scale_b) {
  constexpr int kBits = bits_of(format_a);
  static_assert(kBits == bits_of(format_b));
  const ScaledMmaOperands mine{{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, scale_a, scale_b};
  const uint64_t* const lanes = exchange(reinterpret_cast<uint64_t>(&mine));
  const auto of = [&](int owner) -> const ScaledMmaOperands& {
    return *reinterpret_cast<const ScaledMmaOperands*>(lanes[owner]);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    const uint32_t rows = of(row % 8 * 4 + row / 8).scale_a, columns = of(column * 4).scale_b;
    double sum = 0;
    for (int k = 0; k < 256 / kBits; ++k) {
      const int bit = k * kBits, byte = bit / 8;
      const uint32_t& x = of(row % 8 * 4 + byte % 16 / 4).codes.a[row / 8 + byte / 16 * 2];
      const uint32_t& y = of(column * 4 + byte % 16 / 4).codes.b[byte / 16];
      sum += ScaledMmaOperands::element<format_a>(x, bit) * scale_of<format_a>(rows, k) *
             ScaledMmaOperands::element<format_b>(y, bit) * scale_of<format_b>(columns, k);
    }
    d[i] = float(d[i] + sum);
  }
  sync_warp();  // before anybody's operands go
}

}  // namespace sim
