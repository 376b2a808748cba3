// Barriers that count bytes, tensor maps and the copies that go through them (PTX ISA: mbarrier,
// cp.async.bulk.tensor). A load happens as early as it may, when it is issued; what a store reads
// from shared memory it reads as late as it may, when somebody waits for that.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "cluster.h"

namespace sim {

// ---- mbarrier, in its own 8 bytes ----

struct Mbarrier {
  static constexpr uint32_t kValid = 77;  // nothing that memory holds by chance

  int32_t bytes;  // expected and not yet written
  uint32_t count : 10, pending : 10, phase : 1, valid : 11;

  void check() const {
    if (valid != kValid) fail("something that is not an initialised barrier");
  }

  void complete_phase() {
    if (pending > 0 || bytes != 0) return;
    phase ^= 1;
    pending = count;
  }

  void arrive() {
    check();
    if (pending == 0) fail("more arrivals at a barrier than it expects");
    --pending;
    complete_phase();
  }

  void add_bytes(int32_t more) {
    check();
    bytes += more;
    complete_phase();
  }

  void wait(uint32_t parity) const {
    check();
    wait_until(parity == 0 ? "a barrier of even phase" : "a barrier of odd phase",
               [this, parity] { return phase != parity; });
  }
};
static_assert(sizeof(Mbarrier) == 8);

// The barrier of CTA `rank` that lies where `own` does in this one.
inline Mbarrier& barrier_of(int rank, const void* own) {
  if (rank >= cluster.ctas) fail("a barrier of a CTA that does not exist");
  return *reinterpret_cast<Mbarrier*>(cluster.memory[rank] + offset_of(own));
}

// ---- asynchronous work of one thread, in batches that are committed and waited for in order ----

class Batches {
 public:
  void add(std::function<void()> work) { open_.push_back(std::move(work)); }
  void commit() { committed_.push_back(std::exchange(open_, {})); }
  bool empty() const { return open_.empty() && committed_.empty(); }

  void finish_all_but(size_t left) {
    for (; committed_.size() > left; committed_.pop_front()) {
      for (const auto& work : committed_.front()) work();
    }
  }

 private:
  std::vector<std::function<void()>> open_;
  std::deque<std::vector<std::function<void()>>> committed_;
};

inline Batches stores[kMostCtas * kMostThreads];

// ---- global memory ----

struct Allocation {
  uint64_t begin, end;
};
inline std::vector<Allocation> allocations;

inline void check_global(uint64_t address, uint64_t bytes) {
  for (const Allocation& each : allocations) {
    if (address >= each.begin && address + bytes <= each.end) return;
  }
  fail("an access to global memory outside every tensor");
}

template <class Value>
Value load_global(const Value* from) {
  check_global(reinterpret_cast<uint64_t>(from), sizeof(Value));
  return *from;
}

template <class Value>
Value read_as(const uint8_t* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// ---- tensor maps ----

using Coordinates = std::vector<int32_t>;  // innermost first

struct TensorMap {
  static constexpr int kMostRank = 5;

  int rank;
  uint32_t element_bytes;
  uint64_t base;
  uint64_t sizes[kMostRank], strides[kMostRank];  // strides in bytes
  uint32_t box[kMostRank];
  uint32_t swizzle;  // bytes of its rows: 128, 64, or 0 without

  uint32_t box_elements() const {
    uint32_t count = 1;
    for (int i = 0; i < rank; ++i) count *= box[i];
    return count;
  }
  uint32_t box_bytes() const { return box_elements() * element_bytes; }
  uint32_t shared_alignment() const { return std::max(8 * swizzle, 128u); }
};

// A CUtensorMap of the simulation holds the index of one of these.
inline std::vector<TensorMap> tensor_maps;

inline const TensorMap& map_of(const void* handle) {
  uint64_t index;
  std::memcpy(&index, handle, sizeof index);
  if (index >= tensor_maps.size()) fail("a tensor map that was not encoded");
  return tensor_maps[index];
}

inline uint32_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    default: fail("a tensor map of an unknown type");
  }
}

inline uint32_t swizzle_bytes(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE: return 0;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: fail("a tensor map of an unknown swizzle");
  }
}

// What cuTensorMapEncodeTiled demands of its arguments.
inline bool is_valid(const TensorMap& map) {
  const uint32_t inner = map.box[0] * map.element_bytes;
  if (map.base == 0 || map.base % 16 != 0) return false;
  if (inner % 16 != 0 || (map.swizzle > 0 && inner > map.swizzle)) return false;
  for (int i = 0; i < map.rank; ++i) {
    if (map.sizes[i] == 0 || map.sizes[i] > uint64_t(1) << 32) return false;
    if (map.box[i] == 0 || map.box[i] > 256) return false;
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t(1) << 40)) return false;
  }
  return true;
}

inline CUresult encode(CUtensorMap* handle, CUtensorMapDataType type, cuuint32_t rank, void* base,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map{};
  map.rank = int(rank);
  map.element_bytes = bytes_of(type);
  map.base = reinterpret_cast<uint64_t>(base);
  map.swizzle = swizzle_bytes(swizzle);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    map.sizes[i] = sizes[i];
    map.box[i] = box[i];
    map.strides[i] = i == 0 ? map.element_bytes : strides[i - 1];
  }
  if (!is_valid(map)) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t index = tensor_maps.size();
  tensor_maps.push_back(map);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &index, sizeof index);
  return CUDA_SUCCESS;
}

// Calls visit(offset in the box, global address) for every element; the address of one that the
// tensor does not have is 0. Addresses wrap around at 2^64, which load/ragged.sm90.cuh relies on.
template <class Visit>
void for_each_element(const TensorMap& map, const Coordinates& at, Visit visit) {
  if (int(at.size()) != map.rank) fail("a copy with coordinates of another rank");
  const uint32_t count = map.box_elements();
  for (uint32_t element = 0; element < count; ++element) {
    uint64_t address = map.base;
    bool exists = true;
    uint32_t rest = element;
    for (int i = 0; i < map.rank; ++i) {
      const int64_t x = int64_t(at[i]) + rest % map.box[i];
      rest /= map.box[i];
      exists &= x >= 0 && x < int64_t(map.sizes[i]);
      address += uint64_t(x) * map.strides[i];
    }
    visit(element * map.element_bytes, exists ? address : 0);
  }
}

inline uint8_t* place_in_box(const TensorMap& map, int rank, uint32_t begin, uint32_t offset) {
  const uint32_t address = begin + offset;
  return cluster.memory[rank] + (map.swizzle > 0 ? swizzled(address, map.swizzle) : address);
}

inline void check_box(const TensorMap& map, uint32_t begin) {
  if (begin % map.shared_alignment() != 0) fail("a misaligned box in shared memory");
  if (begin + map.box_bytes() > kSharedBytes) fail("a box beyond shared memory");
}

// Into the same place of every CTA in `ctas`, whose barriers count the bytes.
inline void load_box(const void* handle, const void* barrier, uint16_t ctas, void* to,
                     const Coordinates& at) {
  const TensorMap& map = map_of(handle);
  const uint32_t begin = offset_of(to);
  check_box(map, begin);
  for (int rank = 0; rank < cluster.ctas; ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    for_each_element(map, at, [&](uint32_t offset, uint64_t address) {
      uint8_t* const place = place_in_box(map, rank, begin, offset);
      if (address == 0) {
        std::memset(place, 0, map.element_bytes);
      } else {
        check_global(address, map.element_bytes);
        std::memcpy(place, reinterpret_cast<const void*>(address), map.element_bytes);
      }
    });
    barrier_of(rank, barrier).add_bytes(-int32_t(map.box_bytes()));
  }
}

// cp.async.bulk: bytes as they are.
inline void load_bytes(void* to, const void* from, uint32_t bytes, const void* barrier) {
  const uint32_t begin = offset_of(to);
  const auto address = reinterpret_cast<uint64_t>(from);
  if (begin % 16 != 0 || address % 16 != 0 || bytes % 16 != 0) fail("a misaligned copy of bytes");
  if (begin + bytes > kSharedBytes) fail("a copy beyond shared memory");
  check_global(address, bytes);
  std::memcpy(to, from, bytes);
  barrier_of(cta(), barrier).add_bytes(-int32_t(bytes));
}

// Rounds to nearest, as the copy engine does.
template <class Element>
void add_element(uint64_t address, const uint8_t* place) {
  auto* const to = reinterpret_cast<Element*>(address);
  *to = Element(float(*to) + float(*reinterpret_cast<const Element*>(place)));
}

// `add`: to what lies there, fp32 or bfloat16.
inline void store_box(const void* handle, uint32_t from, const Coordinates& at, bool add = false) {
  const TensorMap& map = map_of(handle);
  const uint32_t begin = offset_of(shared_pointer(from, 16));
  check_box(map, begin);
  stores[cluster.current].add([&map, begin, at, add, rank = cta()] {
    for_each_element(map, at, [&](uint32_t offset, uint64_t address) {
      if (address == 0) return;
      check_global(address, map.element_bytes);
      const uint8_t* const place = place_in_box(map, rank, begin, offset);
      if (add && map.element_bytes == 4) {
        add_element<float>(address, place);
      } else if (add) {
        add_element<__nv_bfloat16>(address, place);
      } else {
        std::memcpy(reinterpret_cast<void*>(address), place, map.element_bytes);
      }
    });
  });
}

}  // namespace sim
