// Rows of activations to int8 with AVX2, group by group. The bits are AVX-512's.
#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {
namespace {

constexpr float kSmallest = 1e-30f;  // below this a group counts as zero; 127 / it is finite

void load_group(const FloatRows& x, std::int64_t at, __m256 (&values)[4]) {
  for (int i = 0; i < 4; ++i) {
    if (x.is_bf16) {
      const auto* data = static_cast<const bf16*>(x.data) + at + 8 * i;
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
      values[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    } else {
      values[i] = _mm256_loadu_ps(static_cast<const float*>(x.data) + at + 8 * i);
    }
  }
}

// Magnitudes are compared as integers: in that order a NaN is larger than infinity.
float largest_of(const __m256 (&values)[4]) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (const __m256& part : values)
    most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(part), magnitude));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return float_from_bits(static_cast<std::uint32_t>(_mm_cvtsi128_si32(four)));
}

// 32 integers to bytes, in order.
__m256i pack_codes(const __m256i (&values)[4]) {
  const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(values[0], values[1]),
                                           _mm256_packs_epi32(values[2], values[3]));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

std::int32_t sum_of(__m256i codes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

void quantize_group(const FloatRows& x, std::int64_t at, int row, QuantizedGroup& group) {
  __m256 values[4];
  load_group(x, at, values);
  const float largest = largest_of(values);
  const bool is_nonzero = largest >= kSmallest;  // not of a NaN
  const __m256 inverse = _mm256_set1_ps(is_nonzero ? 127.0f / largest : 0.0f);
  __m256i integers[4];
  for (int i = 0; i < 4; ++i) integers[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
  const __m256i codes = pack_codes(integers);
  const std::int32_t sum = sum_of(codes);
  const float scale =
      largest != largest ? __builtin_nanf("") : is_nonzero ? largest / 127.0f : 0.0f;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(group.codes[row]), codes);
  group.scales[row] = scale;
  group.scaled_sums[row] = static_cast<float>(sum) * scale;
  group.sums[row] = sum;
}

}  // namespace

void quantize_rows_avx2(const FloatRows& x, Range rows, const QuantizedRows& out) {
  for (int row = rows.begin; row < rows.end; ++row) {
    QuantizedGroup* groups = out.block_of(row);
    for (int g = 0; g < out.num_groups; ++g)
      quantize_group(x, row * x.stride + std::int64_t{g} * kStep, row % QuantizedGroup::kRows,
                     groups[g]);
  }
}

}  // namespace tokenmill
