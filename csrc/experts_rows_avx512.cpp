// Routing, and the sum of a token's experts, with AVX-512. A row is worked on by one thread.
#include "elementwise_math.h"
#include "experts_kernels.h"
#include "pool.h"

namespace tokenmill {
namespace {

// Whether one candidate is chosen before another that comes earlier.
bool is_better(float later, float earlier) {
  return later > earlier || (later != later && earlier == earlier);
}

// The best of some candidates, best first, in memory of `most`.
class Best {
 public:
  Best(float* values, std::int32_t* ids, int most) : values_(values), ids_(ids), most_(most) {}

  // In rising order of ids.
  void offer(float value, std::int32_t id) {
    if (count_ == most_ && !is_better(value, values_[most_ - 1])) return;
    int at = count_ < most_ ? count_++ : most_ - 1;
    for (; at > 0 && is_better(value, values_[at - 1]); --at) {
      values_[at] = values_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    values_[at] = value;
    ids_[at] = id;
  }

 private:
  float* values_;
  std::int32_t* ids_;
  int most_, count_ = 0;
};

__m512 largest_of(const float* logits, int count) {
  __m512 largest = _mm512_set1_ps(-__builtin_inff());
  for (int at = 0; at < count; at += 16) {
    const __mmask16 mask = first_lanes(count - at);
    largest = _mm512_max_ps(_mm512_mask_loadu_ps(largest, mask, logits + at), largest);
  }
  return _mm512_set1_ps(_mm512_reduce_max_ps(largest));
}

// Scores of all experts; returns their sum, in lanes and then over them.
float score(const RoutingCall& call, const float* logits, float* scores) {
  const __m512 largest =
      call.by_logistic ? _mm512_setzero_ps() : largest_of(logits, call.num_experts);
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 sum = _mm512_setzero_ps();
  for (int at = 0; at < call.num_experts; at += 16) {
    const __mmask16 mask = first_lanes(call.num_experts - at);
    const __m512 logit = _mm512_maskz_loadu_ps(mask, logits + at);
    __m512 value = exp_of(call.by_logistic ? _mm512_sub_ps(_mm512_setzero_ps(), logit)
                                           : _mm512_sub_ps(logit, largest));
    if (call.by_logistic) value = _mm512_div_ps(one, _mm512_add_ps(one, value));
    _mm512_mask_storeu_ps(scores + at, mask, value);
    sum = _mm512_add_ps(sum, _mm512_maskz_mul_ps(mask, value, one));
  }
  return _mm512_reduce_add_ps(sum);
}

// Marks the groups that take part in kept[0..num_groups).
void keep_groups(const RoutingCall& call, const float* candidates, bool* kept) {
  const int size = call.num_experts / call.num_groups;
  auto* values = static_cast<float*>(__builtin_alloca(sizeof(float) * call.num_best_groups));
  auto* ids =
      static_cast<std::int32_t*>(__builtin_alloca(sizeof(std::int32_t) * call.num_best_groups));
  Best groups(values, ids, call.num_best_groups);
  for (int group = 0; group < call.num_groups; ++group) {
    float best[2];
    std::int32_t unused[2];
    Best of_group(best, unused, call.group_best);
    for (int i = 0; i < size; ++i) of_group.offer(candidates[group * size + i], i);
    groups.offer(call.group_best == 2 ? best[0] + best[1] : best[0], group);
    kept[group] = false;
  }
  for (int i = 0; i < call.num_best_groups; ++i) kept[ids[i]] = true;
}

void choose(const RoutingCall& call, const float* candidates, float* values,
            std::int32_t* chosen) {
  Best best(values, chosen, call.num_chosen);
  if (call.num_best_groups == call.num_groups) {
    for (int expert = 0; expert < call.num_experts; ++expert)
      best.offer(candidates[expert], expert);
    return;
  }
  auto* kept = static_cast<bool*>(__builtin_alloca(call.num_groups));
  keep_groups(call, candidates, kept);
  const int size = call.num_experts / call.num_groups;
  for (int expert = 0; expert < call.num_experts; ++expert)
    if (kept[expert / size]) best.offer(candidates[expert], expert);
}

}  // namespace

void route_avx512(const RoutingCall& call, Range rows) {
  auto* scores =
      static_cast<float*>(thread_scratch(2, 2 * sizeof(float) * std::size_t(call.num_experts)));
  float* candidates = scores + call.num_experts;
  for (int row = rows.begin; row < rows.end; ++row) {
    float* weights = call.weights + std::int64_t{row} * call.num_chosen;
    std::int32_t* chosen = call.chosen + std::int64_t{row} * call.num_chosen;
    float total = score(call, call.logits + row * call.stride, scores);
    for (int expert = 0; expert < call.num_experts; ++expert)
      candidates[expert] = call.bias != nullptr ? scores[expert] + call.bias[expert]
                                                : scores[expert];
    choose(call, candidates, weights, chosen);
    if (call.renormalize) {
      // The tiny number is for logistic scores, which may all be zero.
      total = call.by_logistic ? 1e-20f : 0.0f;
      for (int i = 0; i < call.num_chosen; ++i) total += scores[chosen[i]];
    } else if (call.by_logistic) {
      total = 1.0f;
    }
    for (int i = 0; i < call.num_chosen; ++i)
      weights[i] = scores[chosen[i]] / total * call.factor;
  }
}

void weighted_sum_avx512(const WeightedSum& call, Range rows) {
  const TokenRows& results = call.results;
  for (int row = rows.begin; row < rows.end; ++row) {
    const float* weights = call.weights + std::int64_t{row} * call.num_chosen;
    const int* places = call.place_of_row + std::int64_t{row} * call.num_chosen;
    for (int at = 0; at < call.hidden; at += 16) {
      const __mmask16 mask = first_lanes(call.hidden - at);
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < call.num_chosen; ++i)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[i]),
                              load_values(results.data, results.is_bf16,
                                          places[i] * results.stride + at, mask),
                              sum);
      if (call.base.data != nullptr)
        sum = _mm512_add_ps(sum, load_values(call.base.data, call.base.is_bf16,
                                             row * call.base.stride + at, mask));
      _mm512_mask_storeu_ps(call.out + row * call.out_stride + at, mask, sum);
    }
  }
}

}  // namespace tokenmill
