// A cluster of CTAs on the CPU. Every thread is a fiber, which runs until it waits for something;
// among those that may go on the order is random, from a seed. A thread that waits for what no
// other thread will ever do ends the program, as every other fault does.
//
// Nothing but fibers is shared with ../compile/cuda_on_cpu: there a block is alone and its threads wait
// for warps and blocks only, here two CTAs see each other's memory and wait for copies, too.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"

namespace sim {

inline constexpr int kMostThreads = 512;  // of one CTA, as in gemm/config.sm90.cuh
inline constexpr int kMostCtas = 2;
inline constexpr uint32_t kSharedBytes = 232448;
inline constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  fibers::Context context;
  std::function<bool()> ready;  // empty: may run
  const char* waits_for = "";   // for people
  bool done = false;
};

// A meeting of a fixed number of threads, again and again.
struct Meeting {
  int arrived = 0;
  unsigned turn = 0;

  void arrive(int expected) {
    if (++arrived < expected) return;
    arrived = 0;
    ++turn;
  }
};

struct Warp {
  Meeting meeting;
  uint64_t slots[2][32];  // two, because the next exchange may begin before all have read this one
};

struct Cluster {
  int ctas = 0;
  int threads = 0;   // of a CTA
  int current = -1;  // of all threads; -1: the host
  std::vector<Fiber> fibers;
  std::vector<char> stacks;
  fibers::Context scheduler;
  std::function<void()> kernel;
  std::function<void()> at_exit;  // of every thread
  Warp warps[kMostCtas * kMostThreads / 32];
  Meeting blocks[kMostCtas];
  Meeting all;
  unsigned exchanges[kMostCtas * kMostThreads];
  unsigned cluster_turn[kMostCtas * kMostThreads];  // in which a thread arrived
  uint8_t* memory[kMostCtas] = {};
};

inline Cluster cluster;
inline std::mt19937 order_of_threads;
inline std::string running;  // GEMM and case, for people

inline int cta() { return cluster.current / cluster.threads; }
inline int thread() { return cluster.current % cluster.threads; }
inline int lane() { return cluster.current % 32; }
inline Fiber& self() { return cluster.fibers[cluster.current]; }
inline Warp& warp() { return cluster.warps[cluster.current / 32]; }

[[noreturn]] inline void fail(const char* format, ...) {
  std::printf("%s: ", running.c_str());
  if (cluster.current >= 0) std::printf("CTA %d, thread %d: ", cta(), thread());
  va_list values;
  va_start(values, format);
  std::vprintf(format, values);
  va_end(values);
  std::printf("\n");
  std::fflush(stdout);
  std::_Exit(1);
}

inline void wait_until(const char* what, std::function<bool()> ready) {
  if (ready()) return;
  self().waits_for = what;
  self().ready = std::move(ready);
  fibers::change(self().context, cluster.scheduler);
}

// ---- warps, blocks, clusters ----

inline void meet(const char* what, Meeting& meeting, int expected) {
  const unsigned turn = meeting.turn;
  meeting.arrive(expected);
  wait_until(what, [&meeting, turn] { return meeting.turn != turn; });
}

inline void sync_warp() { meet("its warp", warp().meeting, 32); }
inline void sync_block() { meet("its block", cluster.blocks[cta()], cluster.threads); }

inline void arrive_at_cluster() {
  cluster.cluster_turn[cluster.current] = cluster.all.turn;
  cluster.all.arrive(cluster.ctas * cluster.threads);
}
inline void wait_for_cluster() {
  const unsigned turn = cluster.cluster_turn[cluster.current];
  wait_until("its cluster", [turn] { return cluster.all.turn != turn; });
}

// What every lane of the warp brings to this exchange.
template <class Value>
const uint64_t* exchange(Value value) {
  static_assert(sizeof value <= sizeof(uint64_t));
  uint64_t* const slots = warp().slots[cluster.exchanges[cluster.current]++ % 2];
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  slots[lane()] = bits;
  sync_warp();
  return slots;
}

template <class Value>
Value shuffle(Value value, int source) {
  const uint64_t* const slots = exchange(value);
  std::memcpy(&value, &slots[source < 0 || source > 31 ? lane() : source], sizeof value);
  return value;
}

// ---- shared memory ----

inline uint8_t* shared_memory() { return cluster.memory[cta()]; }

inline uint32_t offset_of(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - shared_memory());
}

// Addresses carry the CTA's rank above bit 24, as on the device, where that once reached a field of
// a matrix descriptor.
inline uint32_t shared_address(const void* pointer) {
  const uint32_t offset = offset_of(pointer);
  if (offset >= kSharedBytes) fail("the address of something outside its shared memory");
  return uint32_t(cta()) << 24 | offset;
}

inline uint8_t* shared_pointer(uint32_t address, uint32_t bytes) {
  const uint32_t offset = address & 0xffffff;
  if (int(address >> 24) != cta()) fail("an access to another CTA's shared memory");
  if (offset + bytes > kSharedBytes) fail("an access beyond shared memory, at %u", offset);
  if (offset % bytes != 0) fail("a misaligned access of %u bytes, at %u", bytes, offset);
  return shared_memory() + offset;
}

template <class Value>
Value load_shared(uint32_t address) {
  Value value;
  std::memcpy(&value, shared_pointer(address, sizeof value), sizeof value);
  return value;
}

template <class Value>
void store_shared(uint32_t address, const Value& value) {
  std::memcpy(shared_pointer(address, sizeof value), &value, sizeof value);
}

// The swizzle of rows of 128 bytes, or of two rows of 64: their 16-byte units are permuted by the
// number of 128 bytes modulo the units of a row.
constexpr uint32_t swizzled(uint32_t address, uint32_t row_bytes = 128) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

// ---- running ----

inline void thread_main() {
  cluster.kernel();
  cluster.at_exit();
  self().done = true;
  fibers::change(self().context, cluster.scheduler);
}

inline void start_thread(size_t index) {
  char* const stack = cluster.stacks.data() + index * kStackBytes;
  cluster.fibers[index].context.start(stack, kStackBytes, thread_main);
}

inline void start_cluster(int ctas, int threads_of_cta) {
  const size_t threads = size_t(ctas) * size_t(threads_of_cta);
  cluster.ctas = ctas;
  cluster.threads = threads_of_cta;
  cluster.fibers.assign(threads, Fiber());
  cluster.stacks.resize(kMostCtas * kMostThreads * kStackBytes);
  for (Warp& warp : cluster.warps) warp = {};
  for (Meeting& block : cluster.blocks) block = {};
  cluster.all = {};
  std::fill(std::begin(cluster.exchanges), std::end(cluster.exchanges), 0);
  for (uint8_t*& memory : cluster.memory) {
    if (memory == nullptr) {
      memory = static_cast<uint8_t*>(std::aligned_alloc(1024, kSharedBytes));
    }
    std::memset(memory, 0xff, kSharedBytes);  // NaN in every format
  }
  for (size_t i = 0; i < threads; ++i) start_thread(i);
}

[[noreturn]] inline void report_deadlock() {
  std::string stuck;
  for (size_t i = 0; i < cluster.fibers.size(); ++i) {
    const Fiber& fiber = cluster.fibers[i];
    const bool news = i % 32 == 0 || fiber.waits_for != cluster.fibers[i - 1].waits_for;
    if (fiber.done || !news) continue;
    stuck += "\n  CTA " + std::to_string(i / cluster.threads) + ", thread " +
             std::to_string(i % cluster.threads) + " waits for " + fiber.waits_for;
  }
  cluster.current = -1;  // nobody's fault
  fail("deadlock:%s", stuck.c_str());
}

// `enter` is told the index of a thread that is about to go on.
inline void run_cluster(int ctas, int threads, std::function<void()> kernel,
                        std::function<void()> at_exit, const std::function<void(int)>& enter) {
  cluster.kernel = std::move(kernel);
  cluster.at_exit = std::move(at_exit);
  start_cluster(ctas, threads);
  std::vector<int> order(cluster.fibers.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  while (!order.empty()) {
    bool progress = false;
    std::shuffle(order.begin(), order.end(), order_of_threads);
    for (int index : order) {
      Fiber& fiber = cluster.fibers[index];
      cluster.current = index;
      if (fiber.ready && !fiber.ready()) continue;
      fiber.ready = nullptr;
      progress = true;
      enter(index);
      fibers::change(cluster.scheduler, fiber.context);
    }
    if (!progress) report_deadlock();
    const auto done = [](int index) { return cluster.fibers[index].done; };
    order.erase(std::remove_if(order.begin(), order.end(), done), order.end());
  }
  cluster.current = -1;
}

}  // namespace sim
