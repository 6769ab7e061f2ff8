// Kernels whose rows do not depend on each other: norms, gates, gathers, and what is done with
// logits. Sums run in one order for a given length, whatever the batch and the threads are.
#pragma once

#include <cstdint>

#include "attention_kernels.h"
#include "gemm_kernels.h"

namespace tokenmill {

enum class Gate : int { silu = 0, gelu_tanh = 1 };

// Where a kernel puts its rows: as values, or quantised as `quantize_rows` does it with the same
// values in float32.
struct ActivationOutput {
  TokenRows rows;           // data may be null
  QuantizedRows quantized;  // else this is used
};

// residual += x (or residual = x at the start of a stream);
// out = residual / sqrt(mean(residual^2) + eps) * weight.
struct NormCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, size]
  float* residual;
  std::int64_t residual_stride;
  bool starts_stream;
  const float* weight;  // [size]
  float eps;
  ActivationOutput out;
};

// out = gate(x[:, :size]) * x[:, size:].
struct GateCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, 2 * size]
  Gate gate;
  ActivationOutput out;
};

// out[i] = table[ids[i]].
struct GatherCall {
  int num_rows, size;
  TokenRows table;
  const std::int32_t* ids;
  TokenRows out;
};

struct Logits {
  const float* data;  // [num_rows, vocab_size]
  std::int64_t stride;
  int num_rows, vocab_size;

  const float* row(int index) const { return data + index * stride; }
};

// The best token of each row, of equal ones the smallest id. best is NaN if the row holds one.
struct ArgmaxCall {
  Logits logits;
  std::int64_t* token_ids;  // [num_rows]
  float* best;              // [num_rows]
};

// log(sum(exp(row))) of each row, and the log-probabilities of chosen entries.
struct LogprobsCall {
  Logits logits;
  const std::int64_t* token_ids;  // [num_rows, num_chosen]
  int num_chosen;
  float* logprobs;                // [num_rows, num_chosen]
  float* log_sums;                // [num_rows]
  std::int32_t* ranks;            // [num_rows, num_chosen], entries at least as large; may be null
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

void add_rms_norm(const NormCall& call);
void gated_activation(const GateCall& call);
void gather_rows(const GatherCall& call);
void argmax(const ArgmaxCall& call);
void chosen_logprobs(const LogprobsCall& call);
void sample(const SampleCall& call);

// ---------------------------------------------------------------------------------------------
// With AVX-512.

void add_rms_norm_avx512(const NormCall&, Range rows);
void gated_activation_avx512(const GateCall&, Range rows);
void gather_rows_avx512(const GatherCall&, Range rows);

// The largest of some values and its smallest index; NaN if there is one.
struct Largest {
  float value;
  int index;
};
Largest find_largest_avx512(const float* values, int count);

// Sum of exp(values - shift), over entries of at least `lowest`.
double sum_exp_avx512(const float* values, int count, float shift, float lowest);

int count_at_least_avx512(const float* values, int count, float lowest);

// out = (values - best) / temperature.
void scale_logits_avx512(const float* values, int count, float best, float temperature,
                         float* out);

// The largest of each run of 64 values.
void run_maxima_avx512(const float* values, int count, float* maxima);

// Indices of the values that are at least `lowest`, in order; returns how many there are.
int collect_avx512(const float* values, int count, float lowest, std::int32_t* indices);

// The tokens that may be drawn: those above `lowest`, and those equal to it with ids up to `last`.
struct Kept {
  float lowest;
  int last;
};
// The index of the largest values + Gumbel noise, of equal ones the first. values[start] is 0, the
// largest of all.
int draw_avx512(const float* values, int count, int start, const Kept& kept, std::uint64_t key);

}  // namespace tokenmill
