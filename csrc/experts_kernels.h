// What mixtures of experts need of an instruction set, beside products: routing, and the sum of a
// token's experts.
#pragma once

#include <cstdint>

#include "attention_kernels.h"
#include "gemm_kernels.h"

namespace tokenmill {

// How a token's experts are chosen. Scores are e^(logit - largest), or logistic; candidates are
// scores plus `bias`. Only the best groups of experts take part: those whose best candidates
// (`group_best`, 1 or 2 of them) have the largest sums. Among equals, the first one is better; a
// NaN is better than any number, so that it cannot get lost.
struct RoutingCall {
  int num_rows, num_experts, num_chosen;
  const float* logits;  // [num_rows, num_experts]
  std::int64_t stride;
  const float* bias;    // [num_experts] or null
  bool by_logistic;
  bool renormalize;     // a token's weights sum to `factor`; else softmax, or the logistic scores
  int num_groups, num_best_groups, group_best;
  float factor;
  float* weights;        // [num_rows, num_chosen]
  std::int32_t* chosen;  // the same shape
};

// out[row] = base[row] + sum over its choices of weight * results[its place].
struct WeightedSum {
  int num_chosen, hidden;
  const float* weights;     // [num_rows, num_chosen]
  const int* place_of_row;  // [num_rows * num_chosen]
  TokenRows results;
  TokenRows base;
  float* out;
  std::int64_t out_stride;
};

void route_portable(const RoutingCall&, Range rows);
void route_avx2(const RoutingCall&, Range rows);
void route_avx512(const RoutingCall&, Range rows);
void weighted_sum_portable(const WeightedSum&, Range rows);
void weighted_sum_avx2(const WeightedSum&, Range rows);
void weighted_sum_avx512(const WeightedSum&, Range rows);

}  // namespace tokenmill
