// Penalties touch the logits of the tokens that a row has, not those of the whole vocabulary.
#include "sampling_edits.h"

#include <algorithm>
#include <cstring>

#include "common.h"
#include "pool.h"

namespace tokenmill {
namespace {

// Marks a token of the prompt; the bits below count how often the output has it.
constexpr std::uint32_t kInPrompt = 0x80000000u;

// What a thread knows of the tokens of the row that it works on: all zero between two rows.
struct Counts {
  std::uint32_t* of_token;  // [vocab_size]
  std::int32_t* distinct;   // [vocab_size], the tokens that are there, in order of appearance
  int num_distinct = 0;

  void add(std::int32_t token, std::uint32_t amount, bool counts) {
    if (of_token[token] == 0) distinct[num_distinct++] = token;
    of_token[token] = counts ? of_token[token] + amount : of_token[token] | amount;
  }
};

void penalize(const PenaltyCall& call, int entry, Counts& counts) {
  const std::int32_t* tokens = call.token_ids + call.table_rows[entry] * call.token_stride;
  const std::int64_t num_prompt = call.num_prompt_tokens[entry], end = call.num_tokens[entry];
  float* logits = call.logits + call.logits_rows[entry] * call.logits_stride;
  const float repetition = call.repetition[entry];
  const float frequency = call.frequency[entry], presence = call.presence[entry];
  counts.num_distinct = 0;
  // Only repetition looks at the prompt.
  if (repetition != 1.0f)
    for (std::int64_t i = 0; i < num_prompt; ++i) counts.add(tokens[i], kInPrompt, false);
  for (std::int64_t i = num_prompt; i < end; ++i) counts.add(tokens[i], 1, true);
  for (int i = 0; i < counts.num_distinct; ++i) {
    const std::int32_t token = counts.distinct[i];
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
}

}  // namespace

void apply_penalties(const PenaltyCall& call) {
  const std::size_t space = round_up(static_cast<std::size_t>(call.vocab_size), std::size_t{16});
  parallel_for(call.num_entries, [&](int entry, int) {
    auto* memory = static_cast<std::uint32_t*>(thread_scratch(2, 2 * 4 * space));
    // Others use this memory, too, so it is cleared first.
    std::memset(memory, 0, 4 * space);
    Counts counts{memory, reinterpret_cast<std::int32_t*>(memory + space)};
    penalize(call, entry, counts);
  });
}

}  // namespace tokenmill
