#include "common.h"
#include "gemm_limits.h"

namespace tokenmill {
namespace {

constexpr int kSums = 12;       // with both operands they fill the registers
constexpr int kRounds = 20000;  // of kSums products: some hundred microseconds

const __m256i* vectors(const void* data) { return static_cast<const __m256i*>(data); }

}  // namespace

void read_bytes_avx2(const void* data, std::size_t num_bytes, std::size_t ahead) {
  constexpr int kChains = 8;
  const char* bytes = static_cast<const char*>(data);
  __m256i sums[kChains];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (std::size_t at = 0; at + kChains * 32 <= num_bytes; at += kChains * 32) {
    for (int chain = 0; chain < kChains; ++chain) {
      if (chain % 2 == 0) _mm_prefetch(bytes + at + chain * 32 + ahead, _MM_HINT_T0);
      const auto* place = reinterpret_cast<const __m256i*>(bytes + at + chain * 32);
      sums[chain] = _mm256_xor_si256(sums[chain], _mm256_load_si256(place));
    }
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] = _mm256_xor_si256(sums[0], sums[chain]);
  __asm__ volatile("" : : "x"(sums[0]));  // the sum counts as used
}

double multiply_float32_avx2(const void* data) {
  const float* values = static_cast<const float*>(data);
  const __m256 a = _mm256_load_ps(values), b = _mm256_load_ps(values + 8);
  __m256 sums[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_load_ps(values + 16 + 8 * i);  // no two the same
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "x"(sums[i]));  // the sums count as used
  return 2.0 * 8 * kSums * kRounds;
}

double multiply_int8_avx2(const void* data) {
  const __m256i a = _mm256_load_si256(vectors(data)), b = _mm256_load_si256(vectors(data) + 1);
  __m256i sums[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = _mm256_load_si256(vectors(data) + 2 + i);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      __m256i unsigned_codes = a;
      __asm__ volatile("" : "+x"(unsigned_codes));  // each product is made anew
      sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(unsigned_codes, b));
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "x"(sums[i]));
  return 2.0 * 32 * kSums * kRounds;
}

}  // namespace tokenmill
