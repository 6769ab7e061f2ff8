// A step in which every request computes one token and draws the next one: most steps. From the
// rows' tables to the drawn tokens in two calls, so that nothing of the interpreter, of numpy or of
// torch has to come back into the caches that the weights have just passed through.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_plan.h"
#include "lora.h"
#include "program.h"
#include "step_gather.h"

namespace tokenmill {

// What a row asks of sampling; every array is by row.
struct RowColumns {
  const std::uint8_t* is_plain;  // asks for nothing but tokens: no logits edited, none told
  const std::uint8_t* is_greedy;
  const float* temperature;
  const float* min_p;
  const std::int64_t* top_k;
  const double* top_p;
  const std::uint64_t* seed;
  std::int64_t* num_tokens;           // known
  std::int64_t* num_computed_tokens;  // their KV is in the cache
};

// Attention layers of one shape, and whose block tables they use.
struct DecodeAttention {
  AttentionPlan* plan;
  AttentionShape shape;
  int group;
  int num_blocks;
};

// Rows of hidden states as bytes, and the recorded head on its own buffer of `slab` rows.
struct DecodeHead {
  const char* hidden;  // [max_tokens], what the layers end in
  char* input;         // [slab], what the head begins with
  std::int64_t row_bytes;
  const float* logits;  // [slab, vocab_size]
  int slab, vocab_size;
};

// Spent in kernels since the beginning.
struct KernelSeconds {
  double layers = 0.0, head = 0.0, sampling = 0.0;
};

class DecodeStep {
 public:
  // `adapters` is told the rows of each step; null where the layers have none.
  DecodeStep(const StepGather& gather, Program& layers, Program& head,
             std::vector<DecodeAttention> attention, const DecodeHead& buffers,
             const RowColumns& columns, AdapterRows* adapters);

  // Whether a step of these rows may be made here.
  bool takes(const std::vector<std::int64_t>& rows) const;

  // From the rows to a token for each of them; nothing is written yet, so it may be called again.
  // Throws std::invalid_argument if a row has no token to compute, or no place for the next.
  void run(std::vector<std::int64_t> rows);

  // Writes the tokens behind the rows and counts them: the last act of a step.
  void commit();

  const std::vector<std::int64_t>& token_ids() const { return token_ids_; }
  // Places whose best logit is not finite; their tokens are arbitrary.
  std::vector<int> bad_places() const;

  const KernelSeconds& kernel_seconds() const { return kernel_seconds_; }

 private:
  void run_layers();
  void draw();
  void build_plans();
  void gather_columns();
  void draw_slab(std::int64_t begin, int count);

  const StepGather& gather_;
  Program& layers_;
  Program& head_;
  const std::vector<DecodeAttention> attention_;
  const DecodeHead buffers_;
  const RowColumns columns_;
  AdapterRows* const adapters_;
  KernelSeconds kernel_seconds_;

  // Of the step; [num_reqs].
  std::vector<std::int64_t> rows_, ones_, num_computed_, positions_, top_k_, token_ids_;
  std::vector<std::uint8_t> is_greedy_, is_valid_;
  std::vector<float> temperature_, min_p_;
  std::vector<double> top_p_;
  std::vector<std::uint64_t> seed_;
};

}  // namespace tokenmill
