// What a weight in fp32 is split with, and what products with its parts are added up with; host side,
// no device code.
#pragma once

#include <cstdint>

#include "fusegen/common/ceil_div.h"
#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Parts of a number in 16 bits: each is what those before leave of it, times kPartScale each time.
inline constexpr int kWeightParts = 3;
inline constexpr float kPartScale = 2048.0f;

inline constexpr int kFp32WeightThreads = 256;  // of a block of either kernel

struct SplitWeightArguments {
  const float* weight;  // [n, k]
  void* parts;          // [kWeightParts * n, k], 16 bits
  int64_t n;
  int64_t k;  // a multiple of 8
};

struct AddProductsArguments {
  const float* products;  // [tokens, kWeightParts * n]
  const void* bias;       // [n], 16 bits; nullptr: zeros
  float* sums;            // [tokens, n]
  int64_t tokens;
  int64_t n;  // a multiple of 8
};

}  // namespace fusegen
