// Penalties touch the logits of the tokens that a row has, not those of the whole vocabulary.
#include "sampling_edits.h"

#include <vector>

#include "pool.h"

namespace tokenmill {
namespace {

// Marks a token of the prompt; the bits below count how often the output has it.
constexpr std::uint32_t kInPrompt = 0x80000000u;

// What a thread counts of the row that it works on.
struct Counts {
  std::vector<std::uint32_t> of_token;  // all zero between two rows
  std::vector<std::int32_t> distinct;   // the tokens that are there, in order of appearance

  void add(std::int32_t token) {
    if (of_token[token]++ == 0) distinct.push_back(token);
  }
  void add_of_prompt(std::int32_t token) {
    if (of_token[token] == 0) distinct.push_back(token);
    of_token[token] = kInPrompt;
  }
};

void penalize(const PenaltyCall& call, int entry, Counts& counts) {
  const std::int32_t* tokens = call.token_ids + call.table_rows[entry] * call.token_stride;
  const std::int64_t num_prompt = call.num_prompt_tokens[entry], end = call.num_tokens[entry];
  float* logits = call.logits + call.logits_rows[entry] * call.logits_stride;
  const float repetition = call.repetition[entry];
  const float frequency = call.frequency[entry], presence = call.presence[entry];
  // Only repetition looks at the prompt.
  if (repetition != 1.0f)
    for (std::int64_t i = 0; i < num_prompt; ++i) counts.add_of_prompt(tokens[i]);
  for (std::int64_t i = num_prompt; i < end; ++i) counts.add(tokens[i]);
  for (const std::int32_t token : counts.distinct) {
    const std::uint32_t count = counts.of_token[token] & ~kInPrompt;
    counts.of_token[token] = 0;
    float logit = logits[token];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    if (count > 0) {
      logit -= frequency * static_cast<float>(count);
      logit -= presence;
    }
    logits[token] = logit;
  }
  counts.distinct.clear();
}

}  // namespace

void apply_penalties(const PenaltyCall& call) {
  parallel_for(call.num_entries, [&](int entry, int) {
    thread_local Counts counts;
    if (counts.of_token.size() < static_cast<std::size_t>(call.vocab_size))
      counts.of_token.resize(call.vocab_size);
    penalize(call, entry, counts);
  });
}

}  // namespace tokenmill
