// Sampling and scoring as a whole: what is done with a row of logits.
#include "sampling_kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kRun = 64;  // of run_maxima

std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A value that at least k of the row reach, and not many more: the k-th largest of the maxima of
// runs. `maxima` has space for all of them.
float lower_bound(const float* values, int count, int k, float* maxima) {
  const int num_runs = ceil_div(count, kRun);
  if (k > num_runs) return -kInfinity;
  run_maxima(values, count, maxima);
  std::nth_element(maxima, maxima + k - 1, maxima + num_runs, std::greater<float>());
  return maxima[k - 1];
}

// The median of some values spread over all.
float middle(const Weighted& some) {
  constexpr int kSamples = 15;
  float samples[kSamples];
  for (int i = 0; i < kSamples; ++i)
    samples[i] = some.values[std::int64_t{i} * some.count / kSamples];
  std::nth_element(samples, samples + kSamples / 2, samples + kSamples);
  return samples[kSamples / 2];
}

// The largest of the values that together with all above it has at least the weight `wanted`, and
// the weight of those above. The smallest value if there is no such value. Halves the values that
// it can be again and again; they lose their order.
struct Threshold {
  float value;
  double weight_above, weight_equal;
};
Threshold find_threshold(Weighted some, double wanted) {
  double above = 0.0;
  for (;;) {
    const float pivot = middle(some);
    const Split split = tokenmill::split(some, pivot);
    if (split.num_above > 0 && above + split.weight_above >= wanted) {
      some.count = keep(some, pivot, true);
      continue;
    }
    above += split.weight_above;
    if (above + split.weight_equal >= wanted ||
        split.num_above + split.num_equal == some.count)
      return {pivot, above, split.weight_equal / split.num_equal};
    above += split.weight_equal;
    some.count = keep(some, pivot, false);
  }
}

// One row's way from logits to a token.
class RowSampler {
 public:
  RowSampler(const SampleCall& call, int row)
      : call_(call), row_(row), size_(call.logits.vocab_size) {
    const std::size_t space = round_up(size_, 16);
    auto* memory = static_cast<float*>(
        thread_scratch(2, sizeof(float) * (4 * space + ceil_div(size_, kRun))));
    scaled_ = memory;
    weights_ = memory + space;
    candidates_ = {memory + 2 * space, memory + 3 * space, 0};
    maxima_ = memory + 4 * space;
  }

  void run() {
    const float* logits = call_.logits.row(row_);
    const Largest best = find_largest(logits, size_);
    call_.token_ids[row_] = best.index;
    call_.is_valid[row_] = std::isfinite(best.value);
    if (call_.is_greedy[row_] || !std::isfinite(best.value)) return;
    const Kept kept = filter(logits, best.value);
    call_.token_ids[row_] = draw(scaled_, size_, best.index, kept, key());
  }

  // The row as it is drawn from.
  void run_filter(float* out) {
    const float* logits = call_.logits.row(row_);
    const Largest best = find_largest(logits, size_);
    if (call_.is_greedy[row_] || !std::isfinite(best.value)) {
      std::copy(logits, logits + size_, out);
      return;
    }
    const Kept kept = filter(logits, best.value);
    for (int id = 0; id < size_; ++id) {
      const bool stays =
          scaled_[id] > kept.lowest || (scaled_[id] == kept.lowest && id <= kept.last);
      out[id] = stays ? logits[id] / call_.temperature[row_] : -kInfinity;
    }
  }

 private:
  // Scales the logits; which of them may be drawn.
  Kept filter(const float* logits, float best) {
    scale_logits(logits, size_, best, call_.temperature[row_], scaled_);
    Kept kept{-kInfinity, size_};
    if (call_.min_p[row_] > 0.0f) kept.lowest = std::log(call_.min_p[row_]);
    if (call_.top_k[row_] > 0 && call_.top_k[row_] < size_)
      kept.lowest = std::max(kept.lowest, kth_largest(static_cast<int>(call_.top_k[row_])));
    if (call_.top_p[row_] < 1.0) kept = nucleus(kept.lowest, call_.top_p[row_]);
    // Banned tokens are -inf; they are never drawn.
    kept.lowest = std::max(kept.lowest, -3e38f);
    return kept;
  }

  std::uint64_t key() const {
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
    return mix64(mix64(call_.seed[row_] + kGolden) +
                 (static_cast<std::uint64_t>(call_.position[row_]) + 1) * kGolden);
  }

  float kth_largest(int k) {
    const float lowest = lower_bound(scaled_, size_, k, maxima_);
    const Weighted some = gather({scaled_, nullptr, size_}, lowest,
                                        {candidates_.values, nullptr, 0});
    return find_threshold(some, k).value;
  }

  Kept nucleus(float lowest, double top_p) {
    Weighted some{scaled_, nullptr, size_};
    if (lowest > -kInfinity) some = gather(some, lowest, candidates_);
    some.weights = weights_;
    const double mass = weigh(some);
    // Tokens below this share of the mass sum to less than 1 - top_p, so none of them is kept.
    const double share = std::log((1.0 - top_p) / size_ * mass) - 1e-3;
    some = gather(some, std::min(static_cast<float>(share), 0.0f), candidates_);
    const Threshold last = find_threshold(some, top_p * mass);
    // Of equal ones those with the smallest ids are kept, as many as it takes, at least one.
    const double num_kept =
        std::max(1.0, std::ceil((top_p * mass - last.weight_above) / last.weight_equal));
    if (num_kept >= size_) return {last.value, size_};
    return {last.value,
            find_equal(scaled_, size_, last.value, static_cast<int>(num_kept))};
  }

  const SampleCall& call_;
  const int row_, size_;
  float* scaled_;
  float* weights_;
  Weighted candidates_;  // space for all
  float* maxima_;
};

// One row's scores.
class RowScorer {
 public:
  RowScorer(const ScoreCall& call, int row)
      : call_(call), values_(call.logits.row(row)), size_(call.logits.vocab_size), row_(row),
        token_ids_(call.token_ids + std::int64_t{row} * call.width),
        logprobs_(call.logprobs + std::int64_t{row} * call.width) {}

  void run() {
    const int num_best = static_cast<int>(call_.num_best[row_]);
    token_ids_[0] = call_.chosen[row_];
    const Largest best = find_largest(values_, size_);
    call_.is_finite[row_] = std::isfinite(best.value);
    if (!std::isfinite(best.value)) {
      for (int i = 1; i <= num_best; ++i) token_ids_[i] = i - 1;
      for (int i = 0; i <= num_best; ++i) logprobs_[i] = __builtin_nanf("");
      call_.ranks[row_] = 0;
      return;
    }
    const double sum = sum_exp(values_, size_, best.value);
    const double log_sum = static_cast<double>(best.value) + std::log(sum);
    if (num_best > 0) list_best(num_best);
    for (int i = 0; i <= num_best; ++i)
      logprobs_[i] = static_cast<float>(values_[token_ids_[i]] - log_sum);
    call_.ranks[row_] = count_at_least(values_, size_, values_[token_ids_[0]]);
  }

 private:
  void list_best(int n) {
    auto* indices = static_cast<std::int32_t*>(
        thread_scratch(2, sizeof(float) * (std::size_t(size_) + ceil_div(size_, kRun))));
    const float lowest =
        lower_bound(values_, size_, n, reinterpret_cast<float*>(indices + size_));
    const int count = collect(values_, size_, lowest, indices);
    std::partial_sort(indices, indices + n, indices + count, [this](int a, int b) {
      return values_[a] > values_[b] || (values_[a] == values_[b] && a < b);
    });
    std::copy(indices, indices + n, token_ids_ + 1);
  }

  const ScoreCall& call_;
  const float* values_;
  const int size_, row_;
  std::int64_t* token_ids_;
  float* logprobs_;
};

}  // namespace

void sample(const SampleCall& call) {
  require_kernels();
  parallel_for(call.logits.num_rows, [&](int row, int) { RowSampler(call, row).run(); });
}

void filter_logits(const SampleCall& call, float* out, std::int64_t out_stride) {
  require_kernels();
  parallel_for(call.logits.num_rows,
               [&](int row, int) { RowSampler(call, row).run_filter(out + row * out_stride); });
}

void score_tokens(const ScoreCall& call) {
  require_kernels();
  parallel_for(call.logits.num_rows, [&](int row, int) { RowScorer(call, row).run(); });
}

}  // namespace tokenmill
