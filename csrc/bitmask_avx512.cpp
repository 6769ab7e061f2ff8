// One row: a word of the mask bans among 32 logits, which are two vectors.
#include "bitmask_kernels.h"

#include "common.h"

namespace tokenmill {

void apply_bitmask_avx512(float* values, int count, const std::uint32_t* words) {
  const __m512 banned = _mm512_set1_ps(-__builtin_inff());
  const int num_whole = count / 32;
  for (int i = 0; i < num_whole; ++i) {
    const std::uint32_t bans = ~words[i];
    if (bans == 0) continue;
    float* place = values + 32 * i;
    _mm512_mask_storeu_ps(place, static_cast<__mmask16>(bans), banned);
    _mm512_mask_storeu_ps(place + 16, static_cast<__mmask16>(bans >> 16), banned);
  }
  const int num_left = count % 32;
  if (num_left == 0) return;
  const std::uint32_t exists = (std::uint32_t{1} << num_left) - 1;
  const std::uint32_t bans = ~words[num_whole] & exists;
  float* place = values + 32 * num_whole;
  _mm512_mask_storeu_ps(place, static_cast<__mmask16>(bans), banned);
  _mm512_mask_storeu_ps(place + 16, static_cast<__mmask16>(bans >> 16), banned);
}

}  // namespace tokenmill
