// What a quantise step of a plan is launched with: the quantise kernel and what goes before and
// after it; host side, no device code.
#pragma once

#include "fusegen/quantize/quantize.h"

namespace fusegen {

// Scratch is uninitialised; state is changed where `update` says so.
struct QuantizeStepArguments {
  QuantizeArguments quantize;
  float* amax = nullptr;  // result [groups], where a scale spans a tensor or group, not delayed
  float* partial_amax = nullptr;  // scratch [copies that are wanted, groups, kAmaxPartials]
  float* row_amax = nullptr;     // scratch [R], where a scale spans a row
  float* column_amax = nullptr;  // scratch [groups, columns], where a scale spans a column
  float* rowwise_amax = nullptr;     // results [groups], where a scale of blocks has one of the
  float* columnwise_amax = nullptr;  // tensor above it; of the copies that are wanted
  void* sums = nullptr;  // result [groups, columns], over rows; quantize.row_sums is its workspace
  int64_t* rng_state = nullptr;  // state [seed, offset] of stochastic rounding
  DelayedState state = {};           // of delayed scaling
  DelayedArguments* due = nullptr;   // states that a call moves on, or nullptr: no delayed scaling
  bool moves_states = false;         // whether those that are due by now move on after this step
  bool update = false;               // whether this step's state moves on
};

}  // namespace fusegen
