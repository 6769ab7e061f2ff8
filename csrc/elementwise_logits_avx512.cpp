// Passes over a row of logits with AVX-512.
#include <math.h>  // not <cmath>: its inline functions would be compiled for this file's processor

#include "elementwise_kernels.h"
#include "elementwise_math.h"

namespace tokenmill {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr std::uint64_t kMix1 = 0xBF58476D1CE4E5B9ull;
constexpr std::uint64_t kMix2 = 0x94D049BB133111EBull;
constexpr float kLargestNoise = 36.8f;  // -log(-log(1 - 2^-53))

// sampling/random.py, 8 numbers at once.
__m512i mix(__m512i z) {
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(kMix1));
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

// The upper 52 bits of the noise of tokens id .. id + 7.
__m512i noise_bits(std::uint64_t key, int id) {
  const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                           _mm512_set1_epi64(kGolden));
  const std::uint64_t first = key + (std::uint64_t(id) + 1) * kGolden;
  return _mm512_srli_epi64(mix(_mm512_add_epi64(_mm512_set1_epi64(first), steps)), 12);
}

float gumbel(std::uint64_t bits) {
  const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-52;
  return static_cast<float>(-log(-log(uniform)));
}

// 1 - uniform, in float32.
__m256 complement(__m512i bits) {
  const __m512d b = _mm512_cvtepu64_pd(bits);
  const __m512d rest = _mm512_sub_pd(_mm512_set1_pd(0x1p52 - 0.5), b);
  return _mm512_cvtpd_ps(_mm512_mul_pd(rest, _mm512_set1_pd(0x1p-52)));
}

__m512 load_padded(const float* values, int left, float pad) {
  const __mmask16 mask = first_lanes(left);
  return _mm512_mask_loadu_ps(_mm512_set1_ps(pad), mask, values);
}

}  // namespace

Largest find_largest_avx512(const float* values, int count) {
  __m512 largest = _mm512_set1_ps(-__builtin_inff());
  __m512i where = _mm512_set1_epi32(0x7fffffff);
  __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 nan = 0;
  for (int i = 0; i < count; i += 16) {
    const __m512 x = load_padded(values + i, count - i, -__builtin_inff());
    nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __mmask16 larger = _mm512_cmp_ps_mask(x, largest, _CMP_GT_OQ);
    largest = _mm512_mask_mov_ps(largest, larger, x);
    where = _mm512_mask_mov_epi32(where, larger, ids);
    ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16));
  }
  const float value = _mm512_reduce_max_ps(largest);
  const __mmask16 equal = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(value), _CMP_EQ_OQ);
  const int index = _mm512_mask_reduce_min_epi32(equal, where);
  // All are -inf: the first.
  return {nan != 0 ? __builtin_nanf("") : value, index == 0x7fffffff ? 0 : index};
}

double sum_exp_avx512(const float* values, int count, float shift, float lowest) {
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (int i = 0; i < count; i += 16) {
    const __m512 x = load_padded(values + i, count - i, -__builtin_inff());
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
    const __m512 e = _mm512_maskz_mov_ps(counts, exp_of(_mm512_sub_ps(x, _mm512_set1_ps(shift))));
    sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(e)));
    sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(e, 1)));
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
}

int count_at_least_avx512(const float* values, int count, float lowest) {
  int found = 0;
  for (int i = 0; i < count; i += 16) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    found += __builtin_popcount(
        _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(lowest), _CMP_GE_OQ));
  }
  return found;
}

void scale_logits_avx512(const float* values, int count, float best, float temperature,
                         float* out) {
  for (int i = 0; i < count; i += 16) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    _mm512_mask_storeu_ps(out + i, mask,
                          _mm512_div_ps(_mm512_sub_ps(x, _mm512_set1_ps(best)),
                                        _mm512_set1_ps(temperature)));
  }
}

void run_maxima_avx512(const float* values, int count, float* maxima) {
  for (int i = 0; i < count; i += 64) {
    __m512 largest = _mm512_set1_ps(-__builtin_inff());
    for (int j = i; j < i + 64 && j < count; j += 16)
      largest = _mm512_max_ps(largest, load_padded(values + j, count - j, -__builtin_inff()));
    maxima[i / 64] = _mm512_reduce_max_ps(largest);
  }
}

int collect_avx512(const float* values, int count, float lowest, std::int32_t* indices) {
  int found = 0;
  for (int i = 0; i < count; i += 16) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    __mmask16 hits = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(lowest), _CMP_GE_OQ);
    for (; hits != 0; hits &= hits - 1) indices[found++] = i + __builtin_ctz(hits);
  }
  return found;
}

// A token beats the best so far only if its noise is above best - value, that is if
// 1 - uniform < 1 - exp(-exp(value - best)) < exp(value - best). That rules out nearly all of them
// without a logarithm; the rest is computed exactly.
int draw_avx512(const float* values, int count, int start, const Kept& kept, std::uint64_t key) {
  alignas(64) std::uint64_t bits[16];
  _mm512_store_si512(bits, noise_bits(key, start));
  int winner = start;
  float best = values[start] + gumbel(bits[0]);
  const __m512 lowest = _mm512_set1_ps(kept.lowest);
  for (int i = 0; i < count; i += 16) {
    const __m512 x = load_padded(values + i, count - i, -__builtin_inff());
    const __m512 ahead = _mm512_sub_ps(x, _mm512_set1_ps(best));
    __mmask16 open = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(ahead, _mm512_set1_ps(-kLargestNoise), _CMP_GE_OQ);
    if (open == 0) continue;
    const __m512i low = noise_bits(key, i), high = noise_bits(key, i + 8);
    const __m512 rest = _mm512_insertf32x8(_mm512_castps256_ps512(complement(low)),
                                           complement(high), 1);
    const __m512 limit = exp_of(_mm512_add_ps(ahead, _mm512_set1_ps(1e-3f)));
    open &= _mm512_cmp_ps_mask(rest, limit, _CMP_LE_OQ);
    if (open == 0) continue;
    _mm512_store_si512(bits, low);
    _mm512_store_si512(bits + 8, high);
    for (; open != 0; open &= open - 1) {
      const int lane = __builtin_ctz(open), id = i + lane;
      if (values[id] == kept.lowest && id > kept.last) continue;
      const float total = values[id] + gumbel(bits[lane]);
      if (total > best || (total == best && id < winner)) {
        best = total;
        winner = id;
      }
    }
  }
  return winner;
}

}  // namespace tokenmill
