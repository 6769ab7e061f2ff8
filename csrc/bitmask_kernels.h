// Bans by a bitmask: what a grammar does to a row of logits.
#pragma once

#include <cstdint>

namespace tokenmill {

// Sets values[t] to -inf where bit t % 32 of words[t / 32] is not set, for t in [0, count).
void apply_bitmask_portable(float* values, int count, const std::uint32_t* words);
void apply_bitmask_avx2(float* values, int count, const std::uint32_t* words);
void apply_bitmask_avx512(float* values, int count, const std::uint32_t* words);

}  // namespace tokenmill
