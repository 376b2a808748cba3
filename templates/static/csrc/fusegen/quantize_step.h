// What a quantise step of a plan is launched with: the quantise kernel and what goes before and
// after it; host side, no device code.
#pragma once

#include "quantize.h"

namespace fusegen {

// Scratch is uninitialised; state is changed where `update` says so.
struct QuantizeStepArguments {
  QuantizeArguments quantize;
  float* amax = nullptr;  // result [groups], where a scale spans a tensor or group; of no history
  float* partial_amax = nullptr;  // scratch [copies that are wanted, groups, kAmaxPartials]
  float* row_amax = nullptr;     // scratch [R], where a scale spans a row
  float* column_amax = nullptr;  // scratch [groups, columns], where a scale spans a column
  float* rowwise_amax = nullptr;     // results [groups], where a scale of blocks has one of the
  float* columnwise_amax = nullptr;  // tensor above it; of the copies that are wanted
  void* sums = nullptr;  // result [groups, columns], over rows; quantize.row_sums is its workspace
  int64_t* rng_state = nullptr;  // state [seed, offset] of stochastic rounding
  float* history = nullptr;      // state [slots, groups] of delayed scaling
  float* scale = nullptr;        // state [groups]
  int64_t slots = 0;
  float max = 0;                 // largest value of the format
  int margin = 0;
  bool grouped = false;          // a group whose newest amax is 0 does not roll
  bool update = false;           // whether the state moves on
};

}  // namespace fusegen
