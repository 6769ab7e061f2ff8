// The end of a product with AVX2: add the bias, round, store eight columns of a row. For files
// compiled with AVX2 only.
#pragma once

#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {
namespace {

constexpr int kEight = 8;  // columns of a register

// Where the 32 columns of a panel go, in four parts. Columns beyond n are left out.
class PanelOutputAvx2 {
 public:
  PanelOutputAvx2(const OutputRows& out, int n, int panel)
      : out_(out), column_(panel * kPanel), num_columns_(min_of(n - panel * kPanel, kPanel)) {
    // x + -0 is x, for -0 too
    for (int i = 0; i < kPanel; ++i)
      bias_[i] = out.bias != nullptr && i < num_columns_ ? out.bias[column_ + i] : -0.0f;
  }

  void store(int row, int part, __m256 sum) const {
    const __m256 value = _mm256_add_ps(sum, _mm256_load_ps(bias_ + part * kEight));
    const int left = num_columns_ - part * kEight;
    const std::int64_t at = row * out_.stride + column_ + part * kEight;
    if (out_.is_bf16) {
      store_bf16(static_cast<bf16*>(out_.data) + at, left, value);
    } else if (left >= kEight) {
      _mm256_storeu_ps(static_cast<float*>(out_.data) + at, value);
    } else if (left > 0) {
      alignas(32) float values[kEight];
      _mm256_store_ps(values, value);
      std::memcpy(static_cast<float*>(out_.data) + at, values, sizeof(float) * left);
    }
  }

 private:
  static void store_bf16(bf16* target, int count, __m256 value) {
    // To the nearest, ties to even; a NaN stays one.
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256i words = _mm256_srli_epi32(
        _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words),
                                            _mm256_extracti128_si256(words, 1));
    if (count >= kEight) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), halves);
    } else if (count > 0) {
      alignas(16) bf16 values[kEight];
      _mm_store_si128(reinterpret_cast<__m128i*>(values), halves);
      std::memcpy(target, values, sizeof(bf16) * count);
    }
  }

  const OutputRows& out_;
  int column_, num_columns_;
  alignas(32) float bias_[kPanel];
};

}  // namespace
}  // namespace tokenmill
