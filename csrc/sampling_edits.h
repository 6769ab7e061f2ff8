// Edits of logits before a token is chosen, as sampling/edits.py has them.
#pragma once

#include <cstdint>

namespace tokenmill {

// Penalties of some rows of logits by the tokens before the one to be sampled. What they are is told
// in kernels/penalties.py. All columns are [num_entries].
struct PenaltyCall {
  float* logits;  // [num_rows, vocab_size]
  std::int64_t logits_stride;
  int vocab_size, num_entries;
  const std::int64_t* logits_rows;  // each at most once
  const std::int32_t* token_ids;    // [table rows, token_stride]
  std::int64_t token_stride;
  const std::int64_t* table_rows;
  const std::int64_t* num_prompt_tokens;
  const std::int64_t* num_tokens;  // of the row: prompt and output
  const float* repetition;         // 1: off
  const float* frequency;          // 0: off
  const float* presence;           // 0: off
};

void apply_penalties(const PenaltyCall& call);

}  // namespace tokenmill
