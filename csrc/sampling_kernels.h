// What is done with logits: choosing tokens and scoring them. A row is worked on by one thread, and
// its result depends on that row alone.
#pragma once

#include <cstdint>

namespace tokenmill {

struct Logits {
  const float* data;  // [num_rows, vocab_size]
  std::int64_t stride;
  int num_rows, vocab_size;

  const float* row(int index) const { return data + index * stride; }
};

// Samples as sampling/sampler.py does. All columns are [num_rows].
struct SampleCall {
  Logits logits;
  const std::uint8_t* is_greedy;
  const float* temperature;
  const float* min_p;           // 0: off
  const std::int64_t* top_k;    // 0: off
  const double* top_p;          // 1: off
  const std::uint64_t* seed;
  const std::int64_t* position;
  std::int64_t* token_ids;
  std::uint8_t* is_valid;       // whether the best logit is finite
};

// Log-probabilities of a chosen token a row and of the best ones, as sampling/logprobs.py has them.
struct ScoreCall {
  Logits logits;
  const std::int64_t* chosen;    // [num_rows]
  const std::int64_t* num_best;  // [num_rows], at most width - 1 and vocab_size
  int width;
  std::int64_t* token_ids;       // [num_rows, width]: the chosen one, then the best in order
  float* logprobs;               // [num_rows, width]
  std::int32_t* ranks;           // [num_rows], entries that are at least as large as the chosen one
  std::uint8_t* is_finite;       // [num_rows], whether the best logit is; else logprobs are NaN
};

void sample(const SampleCall& call);
// What `sample` draws from, in `out` [num_rows, vocab_size]: logits / temperature, -infinity where
// the filters drop a token. Greedy rows stay as they are. Reads no seed, position or result.
void filter_logits(const SampleCall& call, float* out, std::int64_t out_stride);
void score_tokens(const ScoreCall& call);

// ---------------------------------------------------------------------------------------------
// Passes over a row. Each calls what the instruction set in use provides: `name_portable`,
// `name_avx2` or `name_avx512`.

// The largest of some values and its smallest index. NaN and any index if there is a NaN.
struct Largest {
  float value;
  int index;
};
Largest find_largest(const float* values, int count);

// Sum of exp(values - shift) for values of at most `shift`.
double sum_exp(const float* values, int count, float shift);

int count_at_least(const float* values, int count, float lowest);

// out = (values - best) / temperature.
void scale_logits(const float* values, int count, float best, float temperature,
                         float* out);

// The largest of each run of 64 values.
void run_maxima(const float* values, int count, float* maxima);

// Indices of the values that are at least `lowest`, in order; returns how many there are.
int collect(const float* values, int count, float lowest, std::int32_t* indices);

// Values with weights; weights may be null. There is space for 15 more behind both.
struct Weighted {
  float* values;
  float* weights;
  int count;
};

// weights = exp(values) for values of at most 0; returns their sum.
double weigh(const Weighted& some);

// The values from `lowest` on, and their weights, in `to`; their values may be in the same place.
Weighted gather(const Weighted& from, float lowest, const Weighted& to);

// Keeps the values above `pivot`, or those below it, in place; returns how many.
int keep(const Weighted& some, float pivot, bool above);

// How values lie to one of them. Without weights each counts 1.
struct Split {
  double weight_above, weight_equal;
  int num_above, num_equal;
};
Split split(const Weighted& some, float pivot);

// The index of the n-th value, from 1 on, that equals `value`.
int find_equal(const float* values, int count, float value, int n);

// The tokens that may be drawn: those above `lowest`, and those equal to it with ids up to `last`.
struct Kept {
  float lowest;
  int last;
};
// The index of the largest values + Gumbel noise, of equal ones the first. values[start] is 0, the
// largest of all.
int draw(const float* values, int count, int start, const Kept& kept, std::uint64_t key);

// ---------------------------------------------------------------------------------------------
// What the instruction sets provide, with the parameters above.

#define TOKENMILL_LEVELS(Result, name, ...) \
  Result name##_portable(__VA_ARGS__);      \
  Result name##_avx2(__VA_ARGS__);          \
  Result name##_avx512(__VA_ARGS__);
TOKENMILL_LEVELS(Largest, find_largest, const float*, int)
TOKENMILL_LEVELS(double, sum_exp, const float*, int, float)
TOKENMILL_LEVELS(int, count_at_least, const float*, int, float)
TOKENMILL_LEVELS(void, scale_logits, const float*, int, float, float, float*)
TOKENMILL_LEVELS(void, run_maxima, const float*, int, float*)
TOKENMILL_LEVELS(int, collect, const float*, int, float, std::int32_t*)
TOKENMILL_LEVELS(double, weigh, const Weighted&)
TOKENMILL_LEVELS(Weighted, gather, const Weighted&, float, const Weighted&)
TOKENMILL_LEVELS(int, keep, const Weighted&, float, bool)
TOKENMILL_LEVELS(Split, split, const Weighted&, float)
TOKENMILL_LEVELS(int, find_equal, const float*, int, float, int)
TOKENMILL_LEVELS(int, draw, const float*, int, int, const Kept&, std::uint64_t)
#undef TOKENMILL_LEVELS

}  // namespace tokenmill
