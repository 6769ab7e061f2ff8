// Elementary functions and conversions on 16 floats. For files compiled with AVX-512 only.
//
// Polynomials are fixed, so results are the same on every processor.
#pragma once

#include "common.h"

namespace tokenmill {

// 2^x, relative error 3e-6 (Degree 4) or 1e-7 (Degree 6). 1 at 0; 0 far below, at -1e30, too.
// A NaN stays one.
template <int Degree>
static inline __m512 exp2_of(__m512 x) {
  static_assert(Degree == 4 || Degree == 6);
  constexpr float k4[] = {0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc4cp-5f, 0x1.3a02bap-7f};
  constexpr float k6[] = {0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6aee8p-5f,
                          0x1.3b2d4ep-7f, 0x1.5f3e56p-10f, 0x1.41fbb6p-13f};
  const float* c = Degree == 4 ? k4 : k6;
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(c[Degree - 1]);
  for (int i = Degree - 2; i >= 0; --i) y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(c[i]));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

constexpr float kLog2E = 0x1.715476p+0f;

// e^x, relative error 2e-7. Below -104 it is 0, and above 88 it is e^88. A NaN stays one.
static inline __m512 exp_of(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
  // Two parts of log2(e), since x may be large.
  const __m512 high = _mm512_mul_ps(x, _mm512_set1_ps(kLog2E));
  const __m512 error = _mm512_fmsub_ps(x, _mm512_set1_ps(kLog2E), high);
  const __m512 low = _mm512_fmadd_ps(x, _mm512_set1_ps(0x1.4ae0c0p-26f), error);
  // 2^(high + low) = 2^high (1 + low ln 2); low is tiny.
  const __m512 y = exp2_of<6>(high);
  return _mm512_fmadd_ps(_mm512_mul_ps(y, low), _mm512_set1_ps(0x1.62e430p-1f), y);
}

// tanh(x) = 1 - 2 / (1 + exp(2x)), an absolute error of 2e-7.
static inline __m512 tanh_of(__m512 x) {
  const __m512 limited = _mm512_min_ps(_mm512_set1_ps(44.0f), x);  // a NaN stays one
  const __m512 e = exp2_of<6>(_mm512_mul_ps(limited, _mm512_set1_ps(2.0f * kLog2E)));
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(one, e)));
}

static inline __mmask16 first_lanes(int count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

static inline __m512 widen_bf16(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

static inline __m256i round_to_bf16(__m512 values) {
  return (__m256i)_mm512_cvtneps_pbh(values);
}

// Values of a row of activations, in either type.
static inline __m512 load_values(const void* row, bool is_bf16, std::int64_t at, __mmask16 mask) {
  return is_bf16 ? widen_bf16(_mm256_maskz_loadu_epi16(mask, static_cast<const bf16*>(row) + at))
                 : _mm512_maskz_loadu_ps(mask, static_cast<const float*>(row) + at);
}

static inline void store_values(void* row, bool is_bf16, std::int64_t at, __mmask16 mask,
                                __m512 values) {
  if (is_bf16) {
    _mm256_mask_storeu_epi16(static_cast<bf16*>(row) + at, mask, round_to_bf16(values));
  } else {
    _mm512_mask_storeu_ps(static_cast<float*>(row) + at, mask, values);
  }
}

}  // namespace tokenmill
