// What the choice of experts by a router's logits, and its gradient, are launched with; host side, no
// device code.
#pragma once

#include <cstdint>

#include "fusegen/common/rows.h"
#include "fusegen/common/status.h"

namespace fusegen {

// Of a row, at most: a warp has 32 logits in each lane, and a choice.
inline constexpr int64_t kMostExperts = 1024;
inline constexpr int64_t kMostChoices = 32;

// Of the rows: as many as a Hopper GPU has SMs, on every GPU, as results depend on it.
inline constexpr int64_t kRouteParts = 132;

// What the weights of experts are made of: the softmax of a row, or a function of each logit.
enum class Score { softmax, sigmoid, sqrt_softplus };

// Each row chooses the `choices` largest of its logits, of equal ones the first, NaN before all; with
// a bias, or by groups of which several count, of its scores. With `groups` it does so in the best
// `kept_groups` of so many groups of neighbours, each as good as the sum of its best `group_top`.
//   probs    = scale s / max(sum of the chosen s + eps, least_sum), or scale s
//   aux_loss = aux_coefficient E / (choices rows^2) sum_e n_e sum_t s_te / (sum_e s_te)
//   z_loss   = z_coefficient mean_t lse_t^2
// where n is how often each expert was chosen, by as many rows as that adds up to. aux_loss is the mean
// of that of `sequences` of neighbouring rows, each by its own n.
struct RouteArguments {
  const float* logits;        // [tokens, experts]
  const float* choice_bias;   // [experts]; nullptr: zeros
  const int64_t* all_counts;  // [experts]; nullptr: counts
  float* probs;               // [tokens, choices]
  void* ids;                  // [tokens, choices] int32_t
  int64_t* counts;            // [experts]
  float* aux_loss;
  float* z_loss;
  float* sums;    // [parts, experts + 1]: of s / (sum of s) and, last, of lse^2
  void* chosen;   // [parts, experts] int32_t
  int64_t parts;  // kRouteParts
  Score score;
  bool normalized;
  float scale;
  float eps;
  float least_sum;
  float aux_coefficient;
  float z_coefficient;
  int64_t sequences;  // at most kRouteParts, and a divisor of tokens; 1 with all_counts
  int64_t groups;
  int64_t kept_groups;
  int64_t group_top;
  int64_t tokens;
  int64_t experts;  // a multiple of 8, and of groups
  int64_t choices;
};

struct RouteGradArguments {
  const float* dprobs;        // [tokens, choices]
  const float* logits;        // [tokens, experts]
  const void* ids;            // [tokens, choices] int32_t
  const int64_t* counts;      // [experts]
  const int64_t* all_counts;  // [experts]; nullptr: counts
  const float* daux_loss;     // nullptr: 0
  const float* dz_loss;       // nullptr: 0
  void* dlogits;              // [tokens, experts]
  Score score;
  bool normalized;
  float scale;
  float eps;
  float least_sum;
  float aux_coefficient;
  float z_coefficient;
  int64_t sequences;  // a divisor of tokens; 1 with all_counts
  int64_t tokens;
  int64_t experts;  // a multiple of 8
  int64_t choices;
};

}  // namespace fusegen
