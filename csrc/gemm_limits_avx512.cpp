#include "common.h"
#include "gemm_limits.h"

namespace tokenmill {

void read_bytes_avx512(const void* data, std::size_t num_bytes) {
  constexpr int kChains = 8;
  constexpr std::size_t kAhead = 4096;
  const char* bytes = static_cast<const char*>(data);
  __m512i sums[kChains];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (std::size_t at = 0; at + kChains * 64 <= num_bytes; at += kChains * 64) {
    for (int chain = 0; chain < kChains; ++chain) {
      _mm_prefetch(bytes + at + chain * 64 + kAhead, _MM_HINT_T0);
      sums[chain] = _mm512_xor_si512(sums[chain], _mm512_load_si512(bytes + at + chain * 64));
    }
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] = _mm512_xor_si512(sums[0], sums[chain]);
  __asm__ volatile("" : : "v"(sums[0]));  // the sum counts as used
}

}  // namespace tokenmill
