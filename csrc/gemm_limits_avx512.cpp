#include "common.h"
#include "gemm_limits.h"

namespace tokenmill {
namespace {

constexpr int kSums = 16;       // enough independent sums to hide the latency
constexpr int kRounds = 20000;  // of kSums products: some hundred microseconds

const __m512i* vectors(const void* data) { return static_cast<const __m512i*>(data); }

}  // namespace

void read_bytes_avx512(const void* data, std::size_t num_bytes, std::size_t ahead) {
  constexpr int kChains = 8;
  const char* bytes = static_cast<const char*>(data);
  __m512i sums[kChains];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (std::size_t at = 0; at + kChains * 64 <= num_bytes; at += kChains * 64) {
    for (int chain = 0; chain < kChains; ++chain) {
      _mm_prefetch(bytes + at + chain * 64 + ahead, _MM_HINT_T0);
      sums[chain] = _mm512_xor_si512(sums[chain], _mm512_load_si512(bytes + at + chain * 64));
    }
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] = _mm512_xor_si512(sums[0], sums[chain]);
  __asm__ volatile("" : : "v"(sums[0]));  // the sum counts as used
}

double multiply_bf16_avx512(const void* data) {
  const __m512bh a = (__m512bh)_mm512_load_si512(vectors(data));
  const __m512bh b = (__m512bh)_mm512_load_si512(vectors(data) + 1);
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_load_ps(vectors(data) + 2 + i);  // no two the same
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "v"(sums[i]));  // the sums count as used
  return 2.0 * 32 * kSums * kRounds;
}

double multiply_float32_avx512(const void* data) {
  const __m512 a = _mm512_load_ps(vectors(data)), b = _mm512_load_ps(vectors(data) + 1);
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_load_ps(vectors(data) + 2 + i);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return 2.0 * 16 * kSums * kRounds;
}

double multiply_int8_avx512(const void* data) {
  const __m512i a = _mm512_load_si512(vectors(data));
  const __m512i b = _mm512_load_si512(vectors(data) + 1);
  __m512i sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_load_si512(vectors(data) + 2 + i);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return 2.0 * 64 * kSums * kRounds;
}

}  // namespace tokenmill
