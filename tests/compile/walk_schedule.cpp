// Runs the tile sources, fusegen/tile_source, on the CPU and checks every tile they hand out.
//
// The headers are compiled as plain C++. The 32 lanes of the warp that finds tiles are coroutines;
// every warp-wide operation is a rendezvous at which each lane leaves a value for the others.
//
// Standard input holds one case a line:
//   name tokens n k clusters groups size...       groups = 0: dense, no group sizes
// TILINGS, given by the compiler's command line, lists the tilings to walk each case with.
// Exits with 1, after saying what is wrong, unless all tiles of all cases are as they should be.
// Standard error names every walk as it begins: the last one tells where a broken header crashed.
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

// ---- A warp of coroutines -----------------------------------------------------------------------

struct LaneIndex {
  unsigned x;
};
static LaneIndex threadIdx;  // CUDA's name: that of the running lane

namespace warp {

constexpr unsigned kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;
using Values = std::array<uint64_t, kLanes>;

struct Lane {
  fibers::Context context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool running = false;
  unsigned round = 0;  // rendezvous so far
};

static std::array<Lane, kLanes> lanes;
static fibers::Context caller;
static std::function<void(unsigned)> body;
static Values mailboxes[2];

// Hands over to the next lane that still runs, or, after the last one has ended, to the caller.
static void resume_after(unsigned lane) {
  fibers::Context& from = lanes[lane].context;
  for (unsigned distance = 1; distance <= kLanes; ++distance) {
    const unsigned next = (lane + distance) % kLanes;
    if (!lanes[next].running) continue;
    threadIdx.x = next;
    if (next != lane) fibers::change(from, lanes[next].context);
    return;
  }
  fibers::change(from, caller);
}

// Leaves a value and returns those of all lanes. Lanes take turns in a ring, so that all others
// have left theirs when it is this lane's turn again. Two sets of mailboxes alternate: a lane may
// be one rendezvous ahead of those that have yet to read.
template <class Value>
const Values& exchange(Value value) {
  static_assert(std::is_integral<Value>::value, "mailboxes hold integers");
  const unsigned lane = threadIdx.x;
  Values& mailbox = mailboxes[lanes[lane].round++ % 2];
  mailbox[lane] = static_cast<uint64_t>(value);
  resume_after(lane);
  return mailbox;
}

static void enter() {
  const unsigned lane = threadIdx.x;
  body(lane);
  lanes[lane].running = false;
  resume_after(lane);
}

// Calls `function(lane)` in all lanes at once.
static void run(std::function<void(unsigned)> function) {
  body = std::move(function);
  for (unsigned index = 0; index < kLanes; ++index) {
    Lane& lane = lanes[index];
    lane.running = true;
    lane.round = 0;
    lane.context.start(lane.stack.data(), kStackBytes, enter);
  }
  threadIdx.x = 0;
  fibers::change(caller, lanes[0].context);
}

}  // namespace warp

// ---- What the headers use of CUDA ---------------------------------------------------------------

#define __host__
#define __device__

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// A source outside of the warp gives a lane its own value back, as the hardware does.
template <class Value>
Value value_of_lane(Value mine, unsigned source) {
  const warp::Values& values = warp::exchange(mine);
  return source < warp::kLanes ? static_cast<Value>(values[source]) : mine;
}

template <class Value>
Value __shfl_sync(unsigned, Value value, int source) {
  return value_of_lane(value, static_cast<unsigned>(source) % warp::kLanes);
}

template <class Value>
Value __shfl_up_sync(unsigned, Value value, unsigned distance) {
  return value_of_lane(value, threadIdx.x - distance);
}

template <class Value>
Value __shfl_down_sync(unsigned, Value value, unsigned distance) {
  return value_of_lane(value, threadIdx.x + distance);
}

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return value_of_lane(value, threadIdx.x ^ static_cast<unsigned>(mask));
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const warp::Values& votes = warp::exchange(vote);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < warp::kLanes; ++lane) ballot |= unsigned(votes[lane]) << lane;
  return ballot;
}

inline int32_t __ldg(const int32_t* from) { return *from; }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline void __syncwarp(unsigned = 0xffffffffu) { warp::exchange(0); }
inline void __syncthreads() { warp::exchange(0); }  // the one warp is the whole block

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}

#include "fusegen/tile_source/tile_source.cuh"

// ---- Cases and their expected tiles -------------------------------------------------------------

using fusegen::Gemm;
using fusegen::Share;
using fusegen::Tile;

template <int M, int N, int Cluster>
struct Tiling {
  static constexpr int tile_m = M;
  static constexpr int tile_n = N;
  static constexpr int cluster = Cluster;
};

struct Case {
  std::string name;
  int tokens, n, k, clusters;
  bool dense;
  std::vector<int64_t> sizes;  // of a dense case: all tokens
  bool clears = true;          // rows that no group has; left alone otherwise
};

// A part of the result that is cut into tiles of its own.
struct Region {
  int begin, tokens;
  int rows, k;
};

// What the walk of one case must hand out.
struct Expected {
  std::vector<Region> regions;
  std::vector<int> order;  // regions in the order in which every cluster meets them
  int columns;
  int row_blocks(int region, int tile_m) const { return blocks(regions[region].rows, tile_m); }
  int column_blocks(int tile_n) const { return blocks(columns, tile_n); }
  static int blocks(int extent, int size) { return (extent + size - 1) / size; }
};

static int clamped(int64_t size, int tokens) {
  return static_cast<int>(std::clamp<int64_t>(size, 0, tokens));
}

// Sizes are clamped to [0, T], and so are their running sums.
static std::vector<Region> regions_of(const Case& in, Gemm kind) {
  std::vector<Region> regions;
  int begin = 0;
  for (const int64_t size : in.sizes) {
    const int tokens = std::min(clamped(size, in.tokens), in.tokens - begin);
    switch (kind) {
      case Gemm::fprop: regions.push_back({begin, tokens, tokens, in.k}); break;
      case Gemm::dgrad: regions.push_back({begin, tokens, tokens, in.n}); break;
      case Gemm::wgrad: regions.push_back({begin, tokens, in.n, tokens}); break;
    }
    begin += tokens;
  }
  // Rows that no group has come out zero, which is what a contraction of length 0 gives, or are left.
  const int rest = in.tokens - begin;
  if (kind != Gemm::wgrad && in.clears) regions.push_back({begin, rest, rest, 0});
  return regions;
}

template <Gemm kind, class Config>
Expected expected_of(const Case& in) {
  Expected expected{regions_of(in, kind), {}, kind == Gemm::fprop ? in.n : in.k};
  expected.order.resize(expected.regions.size());
  std::iota(expected.order.begin(), expected.order.end(), 0);
  const bool sorted = kind == Gemm::wgrad &&
                      in.sizes.size() <= size_t(fusegen::KWalk<Config>::kSortedGroups);
  if (sorted) {
    std::stable_sort(expected.order.begin(), expected.order.end(), [&](int a, int b) {
      return clamped(in.sizes[a], in.tokens) > clamped(in.sizes[b], in.tokens);
    });
  }
  return expected;
}

// ---- Reports ------------------------------------------------------------------------------------

constexpr int kMostReports = 20;
static int failures = 0;
static std::string place;  // case, GEMM and tiling that are being walked

__attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  if (++failures > kMostReports) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::printf("%s: ", place.c_str());
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
}

static const char* name_of(Gemm kind) {
  switch (kind) {
    case Gemm::fprop: return "fprop";
    case Gemm::dgrad: return "dgrad";
    case Gemm::wgrad: return "wgrad";
  }
  return "?";
}

static bool same(const Tile& a, const Tile& b) {
  return a.group == b.group && a.row == b.row && a.rows == b.rows && a.column == b.column &&
         a.begin == b.begin && a.tokens == b.tokens && a.k == b.k && a.share == b.share;
}

// ---- Walking ------------------------------------------------------------------------------------

using Tiles = std::vector<Tile>;
using Walked = std::vector<std::vector<Tiles>>;  // [cluster][rank]

template <class Walk>
void collect(Walk walk, size_t most, Tiles& tiles) {
  // A broken walk may never end.
  while (tiles.size() <= most) {
    const Tile tile = walk.next();
    if (tile.group < 0) return;
    tiles.push_back(tile);
  }
}

template <Gemm kind, class Config, class Part>
void walk_as_lane(const fusegen::Walker<kind, Config>& walker, const Part& part, size_t most,
                  Tiles& tiles) {
  using Source = fusegen::TileSource<kind, Config, Part>;
  using Order = typename Source::Order;
  alignas(16) static unsigned char scratch[Order::kScratchBytes + 1];
  static Order order;
  // Shared memory holds anything when a kernel starts. All lanes fill it before one reads.
  std::memset(scratch, 0xff, sizeof scratch);
  std::memset(&order, 0xff, sizeof order);
  __syncthreads();
  order.template sort<warp::kLanes>(walker, scratch);
  if constexpr (kind == Gemm::wgrad) {
    collect(Source(walker, order), most, tiles);
  } else {
    collect(Source(walker, order, part), most, tiles);
  }
}

// Tiles of one block, on which all its lanes must agree.
template <Gemm kind, class Config, class Part>
Tiles walk_block(const Case& in, const Part& part, uint32_t cluster, uint32_t rank, size_t most) {
  fusegen::Walker<kind, Config> walker{};
  walker.shape.group_sizes = in.dense ? nullptr : in.sizes.data();
  walker.shape.tokens = in.tokens;
  walker.shape.groups = static_cast<int32_t>(in.sizes.size());
  walker.shape.n = in.n;
  walker.shape.k = in.k;
  walker.shape.owners = walker.shape.groups + in.clears;
  walker.rank = rank;
  walker.cluster = cluster;
  walker.clusters = static_cast<uint32_t>(in.clusters);

  std::array<Tiles, warp::kLanes> found;
  warp::run([&](unsigned lane) {
    auto mine = walker;
    mine.lane = lane;
    walk_as_lane<kind, Config>(mine, part, most, found[lane]);
  });
  for (unsigned lane = 1; lane < warp::kLanes; ++lane) {
    const bool agree = warp::lanes[lane].round == warp::lanes[0].round &&
                       std::equal(found[0].begin(), found[0].end(), found[lane].begin(),
                                  found[lane].end(), same);
    if (!agree) fail("lanes 0 and %u of cluster %u, rank %u disagree", lane, cluster, rank);
  }
  return found[0];
}

template <Gemm kind, class Config, class Part = fusegen::AllBlocks>
Walked walk(const Case& in, size_t most, const Part& part = {}) {
  Walked walked(in.clusters);
  for (int cluster = 0; cluster < in.clusters; ++cluster) {
    for (int rank = 0; rank < Config::cluster; ++rank) {
      walked[cluster].push_back(walk_block<kind, Config>(in, part, cluster, rank, most));
    }
  }
  return walked;
}

// ---- Checks -------------------------------------------------------------------------------------

static bool check_fields(const Expected& expected, const Tile& tile) {
  if (tile.group >= static_cast<int>(expected.regions.size())) {
    fail("a tile of group %d, which does not exist", tile.group);
    return false;
  }
  const Region& region = expected.regions[tile.group];
  const bool good = tile.begin == region.begin && tile.tokens == region.tokens &&
                    tile.k == region.k && tile.rows == region.rows - tile.row &&
                    tile.row >= 0 && tile.column >= 0 && tile.column < expected.columns;
  if (!good) {
    fail("group %d: a tile at (%d, %d) with %d rows, k %d, tokens %d from %d", tile.group,
         tile.row, tile.column, tile.rows, tile.k, tile.tokens, tile.begin);
  }
  return good;
}

// Both blocks of a cluster load half of the operand that they share, so it must be the same one.
static void check_partners(const Tile& a, const Tile& b) {
  const bool together = a.group == b.group && a.share == b.share;
  const bool aligned = (a.share == Share::a && a.row == b.row && a.column != b.column) ||
                       (a.share == Share::b && a.column == b.column && a.row != b.row);
  if (!together || !aligned) {
    fail("partners (%d, %d) of group %d and (%d, %d) of group %d share nothing", a.row, a.column,
         a.group, b.row, b.column, b.group);
  }
  if (a.rows <= 0) fail("group %d, row %d: the first of a pair has no tile", a.group, a.row);
}

static void check_cluster(const std::vector<Tiles>& ranks) {
  if (ranks.size() == 1) {
    for (const Tile& tile : ranks[0]) {
      if (tile.share != Share::none) fail("group %d: shares with nobody", tile.group);
    }
    return;
  }
  if (ranks[0].size() != ranks[1].size()) {
    fail("partners have %zu and %zu tiles", ranks[0].size(), ranks[1].size());
    return;
  }
  for (size_t i = 0; i < ranks[0].size(); ++i) check_partners(ranks[0][i], ranks[1][i]);
}

static void check_order(const Expected& expected, const Tiles& tiles) {
  std::vector<int> turn_of(expected.order.size());
  for (size_t turn = 0; turn < turn_of.size(); ++turn) turn_of[expected.order[turn]] = turn;
  for (size_t i = 1; i < tiles.size(); ++i) {
    if (turn_of[tiles[i - 1].group] > turn_of[tiles[i].group]) {
      fail("group %d is met before group %d", tiles[i - 1].group, tiles[i].group);
    }
  }
}

// Steps are dealt one by one: no cluster has two more than another.
static void check_balance(const Walked& walked) {
  const auto fewer = [](const auto& a, const auto& b) { return a[0].size() < b[0].size(); };
  const auto [least, most] = std::minmax_element(walked.begin(), walked.end(), fewer);
  const size_t low = (*least)[0].size(), high = (*most)[0].size();
  if (high - low > 1) fail("clusters have between %zu and %zu steps", low, high);
}

// How often each output tile was computed.
template <class Config>
class Coverage {
 public:
  explicit Coverage(const Expected& expected) : expected_(expected) {
    for (size_t group = 0; group < expected.regions.size(); ++group) {
      first_.push_back(total_);
      total_ += expected.row_blocks(group, Config::tile_m) * column_blocks();
    }
    counts_.resize(total_);
  }

  size_t total() const { return total_; }

  void add(const Tile& tile) {
    if (tile.rows <= 0) return;  // only helps its partner
    if (tile.row % Config::tile_m != 0 || tile.column % Config::tile_n != 0) {
      fail("group %d: (%d, %d) is no tile's corner", tile.group, tile.row, tile.column);
      return;
    }
    const int block = tile.row / Config::tile_m * column_blocks() + tile.column / Config::tile_n;
    ++counts_[first_[tile.group] + block];
  }

  void check() const {
    for (size_t group = 0; group < first_.size(); ++group) {
      const size_t end = group + 1 < first_.size() ? first_[group + 1] : total_;
      for (size_t at = first_[group]; at < end; ++at) {
        if (counts_[at] != 1) report(group, static_cast<int>(at - first_[group]), counts_[at]);
      }
    }
  }

 private:
  int column_blocks() const { return expected_.column_blocks(Config::tile_n); }

  void report(size_t group, int block, int count) const {
    fail("group %zu: tile (%d, %d) is computed %d times", group,
         block / column_blocks() * Config::tile_m, block % column_blocks() * Config::tile_n, count);
  }

  const Expected& expected_;
  std::vector<size_t> first_;  // of every region: where its counts begin
  size_t total_ = 0;
  std::vector<int> counts_;
};

// ---- Everything together ------------------------------------------------------------------------

template <Gemm kind, class Config>
void enter(const Case& in) {
  place = in.name + " " + name_of(kind) + " " + std::to_string(Config::tile_m) + "x" +
          std::to_string(Config::tile_n) + " cluster " + std::to_string(Config::cluster);
  std::fprintf(stderr, "%s\n", place.c_str());
}

// Whether every tile is one that there is; counts them all then.
template <class Config>
bool check_walk(const Expected& expected, const Walked& walked, Coverage<Config>& coverage) {
  for (const std::vector<Tiles>& ranks : walked) {
    for (const Tiles& tiles : ranks) {
      const auto good = [&](const Tile& tile) { return check_fields(expected, tile); };
      if (!std::all_of(tiles.begin(), tiles.end(), good)) return false;
      check_order(expected, tiles);
      for (const Tile& tile : tiles) coverage.add(tile);
    }
    check_cluster(ranks);
  }
  check_balance(walked);
  return true;
}

template <Gemm kind, class Config>
size_t check(const Case& in) {
  enter<kind, Config>(in);
  const Expected expected = expected_of<kind, Config>(in);
  Coverage<Config> coverage(expected);
  const Walked walked = walk<kind, Config>(in, coverage.total());
  if (check_walk(expected, walked, coverage)) coverage.check();
  return coverage.total();
}

// Slots that ascend through each region; of its last row none in every third one, and in rows of nobody.
static std::vector<int32_t> slots_of(const Case& in, const std::vector<Region>& regions) {
  std::vector<int32_t> slots;
  for (size_t region = 0; region < regions.size(); ++region) {
    const int64_t tokens = regions[region].tokens;
    for (int64_t i = 0; i < tokens; ++i) {
      const bool nobody = region >= in.sizes.size() || (region % 3 == 0 && i + 1 == tokens);
      slots.push_back(nobody ? -1 : int32_t(i * in.tokens / tokens));
    }
  }
  return slots;
}

// A tile is of a range if all its rows are of slots there.
template <class Config>
void check_part(const Tile& tile, const std::vector<int32_t>& slots, const fusegen::SlotRange& of) {
  if (tile.rows <= 0) return;
  const auto* const first = slots.data() + tile.begin + tile.row;
  const bool within = std::all_of(first, first + std::min(tile.rows, Config::tile_m), [&](int32_t slot) {
    return uint32_t(slot) >= of.first && uint32_t(slot) < of.end;
  });
  if (within != of.inside) fail("group %d: row %d is in the other part", tile.group, tile.row);
}

// Row blocks of slots in a range, and then the others, are all that there are.
template <Gemm kind, class Config>
size_t check_in_parts(const Case& in) {
  enter<kind, Config>(in);
  const Expected expected = expected_of<kind, Config>(in);
  const std::vector<int32_t> slots = slots_of(in, expected.regions);
  const auto third = uint32_t(in.tokens / 3), all = uint32_t(in.tokens);
  size_t tiles = 0;
  const std::pair<uint32_t, uint32_t> ranges[] = {{0, third}, {third, 2 * third}, {third, all}};
  for (const auto& [first, end] : ranges) {
    Coverage<Config> coverage(expected);
    for (const bool inside : {true, false}) {
      const fusegen::SlotRange of{first, end, inside};
      const fusegen::BlocksOfSlots<Config::tile_m> part(slots.data(), of);
      const Walked walked = walk<kind, Config>(in, coverage.total(), part);
      if (!check_walk(expected, walked, coverage)) return tiles;
      if (first == end) continue;  // of no slots: all are the others
      for (const std::vector<Tiles>& ranks : walked) {
        for (const Tiles& each : ranks) {
          for (const Tile& tile : each) check_part<Config>(tile, slots, of);
        }
      }
    }
    coverage.check();
    tiles += coverage.total();
  }
  return tiles;
}

template <class Config>
size_t check_kinds(const Case& in) {
  return check<Gemm::fprop, Config>(in) + check<Gemm::dgrad, Config>(in) +
         check<Gemm::wgrad, Config>(in);
}

// Where rows are left alone.
template <class Config>
size_t check_kinds_of_rows(const Case& in) {
  return check<Gemm::fprop, Config>(in) + check<Gemm::dgrad, Config>(in);
}

template <class... Tilings>
size_t check_tilings(Case in) {
  size_t tiles = (check_kinds<Tilings>(in) + ...);
  if (!in.dense && in.clusters < 10) {
    tiles += ((check_in_parts<Gemm::fprop, Tilings>(in) + check_in_parts<Gemm::dgrad, Tilings>(in)) + ...);
  }
  if (regions_of(in, Gemm::fprop).back().tokens == 0) return tiles;
  in.clears = false;
  in.name += ", rows left";
  return tiles + (check_kinds_of_rows<Tilings>(in) + ...);
}

static bool read_case(Case& in) {
  char name[64];
  size_t groups = 0;
  const int found = std::scanf("%63s %d %d %d %d %zu", name, &in.tokens, &in.n, &in.k,
                               &in.clusters, &groups);
  if (found != 6) return false;
  in.name = name;
  in.dense = groups == 0;
  in.sizes.assign(in.dense ? 1 : groups, in.tokens);
  if (in.dense) return true;
  for (int64_t& size : in.sizes) {
    if (std::scanf("%" SCNd64, &size) != 1) return false;
  }
  return true;
}

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // reports must survive a crash
  Case in;
  int cases = 0;
  size_t tiles = 0;
  for (; read_case(in); ++cases) tiles += check_tilings<TILINGS>(in);
  std::printf("%d cases, %zu tiles, %d failures\n", cases, tiles, failures);
  return failures == 0 ? 0 : 1;
}
