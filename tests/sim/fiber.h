// Fibers: functions with stacks of their own that hand over to each other.
//
// As ucontext has them, but for a change from one to another, which is a jump: swapcontext would ask
// the system for the mask of signals each time, which took two fifths of a simulation.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace fibers {

// glibc's by its own name: the one that checks takes a jump to another stack for a fault.
extern "C" [[noreturn]] void jump(jmp_buf to, int value) __asm__("_longjmp");

class Context {
 public:
  // Will begin `main`, which never returns, on a stack.
  void start(char* stack, size_t bytes, void (*main)()) {
    getcontext(&begin_);
    begin_.uc_stack.ss_sp = stack;
    begin_.uc_stack.ss_size = bytes;
    begin_.uc_link = nullptr;
    makecontext(&begin_, main, 0);
    is_new_ = true;
  }

  friend void change(Context& from, Context& to);

 private:
  ucontext_t begin_;
  jmp_buf place_;  // where it was left
  bool is_new_ = false;
};

// Leaves the one that runs and goes on with another; returns once that is changed back.
inline void change(Context& from, Context& to) {
  if (_setjmp(from.place_) != 0) return;
  if (!to.is_new_) jump(to.place_, 1);
  to.is_new_ = false;
  setcontext(&to.begin_);
}

}  // namespace fibers
