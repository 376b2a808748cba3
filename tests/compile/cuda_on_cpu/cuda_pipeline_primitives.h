// Copies that go on while a thread computes, on the CPU: what is there in between may be anything,
// so that is written where they begin, and what they copy where the thread waits for them.
#pragma once

#include <deque>
#include <vector>

#include "cuda_runtime_api.h"

namespace on_cpu {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
struct Copies {
  std::vector<Copy> begun;
  std::deque<std::vector<Copy>> groups;
};
inline Copies& own_copies() {
  static std::vector<Copies> of_threads;
  const unsigned id = block.current->id;
  if (of_threads.size() <= id) of_threads.resize(id + 1);
  return of_threads[id];
}

}  // namespace on_cpu

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  std::memset(to, 0xff, bytes);  // NaN
  on_cpu::own_copies().begun.push_back({to, from, bytes});
}
inline void __pipeline_commit() {
  on_cpu::Copies& own = on_cpu::own_copies();
  own.groups.push_back(std::move(own.begun));
  own.begun.clear();
}
inline void __pipeline_wait_prior(size_t left) {
  auto& groups = on_cpu::own_copies().groups;
  for (; groups.size() > left; groups.pop_front()) {
    for (const on_cpu::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}
