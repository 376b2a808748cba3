// What an expression that the generator printed says of its operands and results.
#pragma once

namespace fusegen {

// Halves of a row are whole, or alternate in blocks of 32 columns.
enum class Access { full, first_half, second_half, first_of_32, second_of_32, row, column };

// How an operand or result is indexed, and whether its elements are fp32.
struct Slot {
  Access access;
  bool wide;
};

}  // namespace fusegen
