// Elementwise kernels as a whole: the split among threads, and sampling.
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "elementwise_kernels.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kTaskValues = 1 << 13;
constexpr int kChunk = 1 << 13;  // logits of a row that a thread works on alone
constexpr float kInfinity = __builtin_inff();

void require_vectors() {
  if (active_isa() == Isa::reference)
    throw std::runtime_error("the native kernels need AVX-512 with VNNI and BF16");
}

// body(Range) over rows, in tasks of a few thousand values.
template <class F>
void for_rows(int num_rows, int row_values, F&& body) {
  require_vectors();
  const int task_rows = kTaskValues / (row_values + 1) + 1;
  parallel_for(ceil_div(num_rows, task_rows), [&](int task, int) {
    const int row = task * task_rows;
    body(Range{row, std::min(row + task_rows, num_rows)});
  });
}

// One chunk of a row of logits.
struct ChunkResult {
  Largest largest;
  double sum;  // of exp(value - largest)
};

// body(values, count, result) over the chunks of all rows; the results of a row lie together.
template <class F>
const ChunkResult* for_chunks(const Logits& logits, F&& body) {
  require_vectors();
  const int num_chunks = ceil_div(logits.vocab_size, kChunk);
  auto* results = static_cast<ChunkResult*>(
      thread_scratch(2, sizeof(ChunkResult) * num_chunks * std::size_t(logits.num_rows)));
  parallel_for(logits.num_rows * num_chunks, [&](int task, int) {
    const int begin = task % num_chunks * kChunk;
    body(logits.row(task / num_chunks) + begin, std::min(kChunk, logits.vocab_size - begin),
         results[task]);
  });
  return results;
}

// The largest of a row from those of its chunks.
Largest join(const ChunkResult* chunks, int num_chunks) {
  Largest all = chunks[0].largest;
  for (int i = 1; i < num_chunks; ++i) {
    const Largest& next = chunks[i].largest;
    if (next.value > all.value || std::isnan(next.value))
      all = {next.value, next.index + i * kChunk};
    if (std::isnan(all.value)) break;
  }
  return all;
}

// A finite number in place of an infinity, so that inf - inf does not arise.
float finite(float value) { return std::isinf(value) ? 0.0f : value; }

std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// One row's way from logits to a token.
class RowSampler {
 public:
  RowSampler(const SampleCall& call, int row)
      : call_(call), row_(row), size_(call.logits.vocab_size) {
    const std::size_t num_runs = ceil_div(size_, kRun);
    auto* memory = static_cast<std::uint8_t*>(thread_scratch(
        2, size_ * (sizeof(float) + sizeof(std::int32_t) + sizeof(Candidate)) +
               num_runs * sizeof(float)));
    candidates_ = reinterpret_cast<Candidate*>(memory);
    scaled_ = reinterpret_cast<float*>(candidates_ + size_);
    indices_ = reinterpret_cast<std::int32_t*>(scaled_ + size_);
    maxima_ = reinterpret_cast<float*>(indices_ + size_);
  }

  void run() {
    const float* logits = call_.logits.row(row_);
    const Largest best = find_largest_avx512(logits, size_);
    call_.token_ids[row_] = best.index;
    call_.is_valid[row_] = std::isfinite(best.value);
    if (call_.is_greedy[row_] || !std::isfinite(best.value)) return;
    scale_logits_avx512(logits, size_, best.value, call_.temperature[row_], scaled_);
    Kept kept{-kInfinity, size_};
    if (call_.min_p[row_] > 0.0f) kept.lowest = std::log(call_.min_p[row_]);
    if (call_.top_k[row_] > 0 && call_.top_k[row_] < size_)
      kept.lowest = std::max(kept.lowest, kth_largest(static_cast<int>(call_.top_k[row_])));
    if (call_.top_p[row_] < 1.0) kept = nucleus(kept.lowest, call_.top_p[row_]);
    // Banned tokens are -inf; they are never drawn.
    kept.lowest = std::max(kept.lowest, -3e38f);
    call_.token_ids[row_] = draw_avx512(scaled_, size_, best.index, kept, key());
  }

 private:
  static constexpr int kRun = 64;

  struct Candidate {
    double weight;
    float value;
    std::int32_t id;
    bool operator<(const Candidate& other) const {
      return value > other.value || (value == other.value && id < other.id);
    }
  };

  std::uint64_t key() const {
    constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
    return mix64(mix64(call_.seed[row_] + kGolden) +
                 (static_cast<std::uint64_t>(call_.position[row_]) + 1) * kGolden);
  }

  // The k-th largest of the maxima of runs is a lower bound that few values reach.
  float kth_largest(int k) {
    float lowest = -kInfinity;
    const int num_runs = ceil_div(size_, kRun);
    if (k <= num_runs) {
      run_maxima_avx512(scaled_, size_, maxima_);
      std::nth_element(maxima_, maxima_ + k - 1, maxima_ + num_runs, std::greater<float>());
      lowest = maxima_[k - 1];
    }
    const int count = collect_avx512(scaled_, size_, lowest, indices_);
    std::nth_element(indices_, indices_ + k - 1, indices_ + count,
                     [this](int a, int b) { return scaled_[a] > scaled_[b]; });
    return scaled_[indices_[k - 1]];
  }

  // Tokens below this share of the mass sum to less than 1 - top_p, so none of them is kept.
  Kept nucleus(float lowest, double top_p) {
    const double mass = sum_exp_avx512(scaled_, size_, 0.0f, lowest);
    const double share = std::log((1.0 - top_p) / size_ * mass) - 1e-3;
    const float bound = std::max(lowest, std::min(static_cast<float>(share), 0.0f));
    const int count = collect_avx512(scaled_, size_, bound, indices_);
    for (int i = 0; i < count; ++i) {
      const float value = scaled_[indices_[i]];
      candidates_[i] = {std::exp(static_cast<double>(value)), value, indices_[i]};
    }
    const Candidate& last = last_kept(count, top_p * mass);
    return {last.value, last.id};
  }

  // The first candidate, in falling order, with which the mass reaches `wanted`; halves the range
  // that it can be in.
  const Candidate& last_kept(int count, double wanted) {
    int begin = 0, end = count;
    double before = 0.0;
    while (end - begin > 1) {
      const int middle = begin + (end - begin) / 2;
      std::nth_element(candidates_ + begin, candidates_ + middle, candidates_ + end);
      double mass = before;
      for (int i = begin; i < middle; ++i) mass += candidates_[i].weight;
      if (mass >= wanted) {
        end = middle;
      } else {
        begin = middle;
        before = mass;
      }
    }
    return candidates_[begin];
  }

  const SampleCall& call_;
  const int row_, size_;
  Candidate* candidates_;
  float* scaled_;
  std::int32_t* indices_;
  float* maxima_;
};

}  // namespace

void add_rms_norm(const NormCall& call) {
  for_rows(call.num_rows, call.size, [&](Range rows) { add_rms_norm_avx512(call, rows); });
}

void gated_activation(const GateCall& call) {
  for_rows(call.num_rows, 2 * call.size, [&](Range rows) { gated_activation_avx512(call, rows); });
}

void gather_rows(const GatherCall& call) {
  for_rows(call.num_rows, call.size, [&](Range rows) { gather_rows_avx512(call, rows); });
}

void argmax(const ArgmaxCall& call) {
  const ChunkResult* chunks = for_chunks(
      call.logits, [](const float* values, int count, ChunkResult& result) {
        result.largest = find_largest_avx512(values, count);
      });
  const int num_chunks = ceil_div(call.logits.vocab_size, kChunk);
  for (int row = 0; row < call.logits.num_rows; ++row) {
    const Largest largest = join(chunks + std::int64_t{row} * num_chunks, num_chunks);
    call.token_ids[row] = largest.index;
    call.best[row] = largest.value;
  }
}

void chosen_logprobs(const LogprobsCall& call) {
  const ChunkResult* chunks = for_chunks(
      call.logits, [](const float* values, int count, ChunkResult& result) {
        result.largest = find_largest_avx512(values, count);
        result.sum = sum_exp_avx512(values, count, finite(result.largest.value), -kInfinity);
      });
  const int num_chunks = ceil_div(call.logits.vocab_size, kChunk);
  for (int row = 0; row < call.logits.num_rows; ++row) {
    const ChunkResult* own = chunks + std::int64_t{row} * num_chunks;
    const float best = join(own, num_chunks).value;
    double sum = 0.0;
    for (int i = 0; i < num_chunks; ++i) {
      if (own[i].sum == 0.0) continue;  // all -inf
      sum += own[i].sum * std::exp(static_cast<double>(finite(own[i].largest.value)) -
                                   static_cast<double>(finite(best)));
    }
    const double log_sum = static_cast<double>(finite(best)) + std::log(sum);
    call.log_sums[row] = static_cast<float>(log_sum);
    for (int i = 0; i < call.num_chosen; ++i) {
      const std::int64_t at = std::int64_t{row} * call.num_chosen + i;
      const double logit = call.logits.row(row)[call.token_ids[at]];
      call.logprobs[at] = static_cast<float>(logit - log_sum);
    }
  }
  if (call.ranks == nullptr) return;
  parallel_for(call.logits.num_rows, [&](int row, int) {
    for (int i = 0; i < call.num_chosen; ++i) {
      const std::int64_t at = std::int64_t{row} * call.num_chosen + i;
      const float* logits = call.logits.row(row);
      call.ranks[at] = count_at_least_avx512(logits, call.logits.vocab_size,
                                             logits[call.token_ids[at]]);
    }
  });
}

void sample(const SampleCall& call) {
  require_vectors();
  parallel_for(call.logits.num_rows, [&](int row, int) { RowSampler(call, row).run(); });
}

}  // namespace tokenmill
