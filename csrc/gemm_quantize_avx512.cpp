// Rows of activations to int8 with AVX-512, four groups at a time: what is found for a group, its
// largest value, scale and sum, is found for four in the lanes of one register.
#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {
namespace {

constexpr int kGroups = 4;
constexpr float kSmallest = 1e-30f;  // below this a group counts as zero; 127 / it is finite

struct Group {
  __m512 low, high;  // 32 values
};

Group load_group(const FloatRows& x, std::int64_t at) {
  if (x.is_bf16) {
    const __m512i values = _mm512_loadu_si512(static_cast<const bf16*>(x.data) + at);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(values));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(values, 1));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)),
            _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))};
  }
  const float* values = static_cast<const float*>(x.data) + at;
  return {_mm512_loadu_ps(values), _mm512_loadu_ps(values + kHalf)};
}

// Magnitudes are compared as integers: in that order a NaN is larger than infinity.
__m512i magnitudes(const Group& group) {
  return _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(group.low)),
                          _mm512_castps_si512(_mm512_abs_ps(group.high)));
}

// Lane i is the largest of values[i].
__m128i largest_of(const __m512i (&values)[kGroups]) {
  const __m512i first = _mm512_max_epu32(_mm512_unpacklo_epi32(values[0], values[1]),
                                         _mm512_unpackhi_epi32(values[0], values[1]));
  const __m512i second = _mm512_max_epu32(_mm512_unpacklo_epi32(values[2], values[3]),
                                          _mm512_unpackhi_epi32(values[2], values[3]));
  const __m512i lanes = _mm512_max_epu32(_mm512_unpacklo_epi64(first, second),
                                         _mm512_unpackhi_epi64(first, second));
  const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(lanes),
                                        _mm512_extracti64x4_epi64(lanes, 1));
  return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

struct Scales {
  __m128 scale, inverse;
};

Scales scales_of(__m128i magnitude_bits) {
  const __m128 largest = _mm_castsi128_ps(magnitude_bits), most = _mm_set1_ps(127.0f);
  const __mmask8 is_nan = _mm_cmp_ps_mask(largest, largest, _CMP_UNORD_Q);
  const __mmask8 is_nonzero = _mm_cmp_ps_mask(largest, _mm_set1_ps(kSmallest), _CMP_GE_OQ);
  return {_mm_mask_mov_ps(_mm_maskz_div_ps(is_nonzero, largest, most), is_nan,
                          _mm_set1_ps(__builtin_nanf(""))),
          _mm_maskz_div_ps(is_nonzero, most, largest)};
}

// Two groups of codes, in order.
__m512i pack_codes(const __m512i (&values)[4]) {
  const __m512i words = _mm512_packs_epi32(values[0], values[1]);
  const __m512i more_words = _mm512_packs_epi32(values[2], values[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, more_words));
}

// The sums of four groups of codes.
__m128i sums_of(__m512i first_two, __m512i last_two) {
  const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
  const __m512i first = _mm512_dpbusd_epi32(zero, ones, first_two);
  const __m512i last = _mm512_dpbusd_epi32(zero, ones, last_two);
  // In each lane of four: two sums of groups 0 and 2 (in the lower half), or of 1 and 3.
  const __m512i pairs = _mm512_add_epi32(_mm512_unpacklo_epi32(first, last),
                                         _mm512_unpackhi_epi32(first, last));
  const __m512i lanes = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_BADC));
  const __m256i even = _mm512_castsi512_si256(lanes), odd = _mm512_extracti64x4_epi64(lanes, 1);
  return _mm_unpacklo_epi32(
      _mm_add_epi32(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1)),
      _mm_add_epi32(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1)));
}

// Groups [0, kGroups) of a row, of which only `count` are there.
TOKENMILL_INLINE void quantize_groups(const FloatRows& x, std::int64_t at, int count, int row,
                                      QuantizedGroup* groups) {
  Group values[kGroups];
  __m512i largest[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    values[g] = load_group(x, at + min_of(g, count - 1) * kStep);
    largest[g] = magnitudes(values[g]);
  }
  const Scales scales = scales_of(largest_of(largest));

  __m512i codes[2];
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    __m512i integers[4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int g = 2 * pair + i;
      const __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(g),
                                                   _mm512_castps128_ps512(scales.inverse));
      integers[2 * i] = _mm512_cvtps_epi32(_mm512_mul_ps(values[g].low, inverse));
      integers[2 * i + 1] = _mm512_cvtps_epi32(_mm512_mul_ps(values[g].high, inverse));
    }
    codes[pair] = pack_codes(integers);
  }
  const __m128i sums = sums_of(codes[0], codes[1]);

  alignas(64) std::int8_t all_codes[kGroups][kStep];
  alignas(16) float all_scales[kGroups], scaled_sums[kGroups];
  alignas(16) std::int32_t all_sums[kGroups];
  _mm512_store_si512(all_codes[0], codes[0]);
  _mm512_store_si512(all_codes[2], codes[1]);
  _mm_store_ps(all_scales, scales.scale);
  _mm_store_ps(scaled_sums, _mm_mul_ps(_mm_cvtepi32_ps(sums), scales.scale));
  _mm_store_si128(reinterpret_cast<__m128i*>(all_sums), sums);
  for (int g = 0; g < count; ++g) {
    std::memcpy(groups[g].codes[row], all_codes[g], kStep);
    groups[g].scales[row] = all_scales[g];
    groups[g].scaled_sums[row] = scaled_sums[g];
    groups[g].sums[row] = all_sums[g];
  }
}

}  // namespace

void quantize_rows_avx512(const FloatRows& x, Range rows, const QuantizedRows& out) {
  for (int row = rows.begin; row < rows.end; ++row) {
    QuantizedGroup* groups = out.block_of(row);
    for (int g = 0; g < out.num_groups; g += kGroups)
      quantize_groups(x, row * x.stride + g * kStep, min_of(kGroups, out.num_groups - g),
                      row % QuantizedGroup::kRows, groups + g);
  }
}

}  // namespace tokenmill
