// Turns of threads that change the same tensors in place, such as the state of delayed scaling.
#pragma once

#include <mutex>

namespace fusegen {

// Held while a call launches its kernels: on a stream, those of another thread's call then run
// before all of them or after.  Calls on several streams are the caller's to order, as always.
inline std::mutex& changes() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace fusegen
