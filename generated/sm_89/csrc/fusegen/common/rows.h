// How rows lie in memory that kernels load 16 bytes at a time; host side, no device code.
#pragma once

namespace fusegen {

inline constexpr int kRowAlignment = 8;  // elements of 16 bits: rows are multiples of 16 bytes
inline constexpr int kPitch = 16;        // bytes that rows of codes are multiples of

// What a unit states of its rows, as the generator derived it, is what device code was written for.
template <class Stated>
constexpr bool agrees_rows() {
  static_assert(Stated::row_alignment == kRowAlignment, "row_alignment: unit against rows.h");
  return true;
}

// The same of the codes that it reads or writes.
template <class Stated>
constexpr bool agrees_copies() {
  static_assert(Stated::pitch == kPitch, "pitch: unit against rows.h");
  return true;
}

}  // namespace fusegen
