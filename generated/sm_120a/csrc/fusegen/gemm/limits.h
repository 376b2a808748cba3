// What an architecture has; host side, no device code.
#pragma once

namespace fusegen {

// Bytes of shared memory that one CTA may take, registers of an SM.
template <int SharedMemory, int Registers>
struct Limits {
  static constexpr int shared_memory = SharedMemory;
  static constexpr int registers = Registers;
};

}  // namespace fusegen
