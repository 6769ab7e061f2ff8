// AVX-512's registers and operations, made of pairs of AVX2's, so that one source serves both: an
// _avx2.cpp file includes this first and then the source of its _avx512.cpp. Only what these
// sources use is here. Operations give what AVX-512's do, except:
//   sums of all lanes         in an order of their own
//   bf16 products             two fused multiply-adds
//   scalef                    2^n for n in [-250, 250]; beyond it, as at these
//   masks of 16-bit lanes     all, the first ones, or every second one, as said
#pragma once

#include "common.h"

namespace tokenmill {
namespace {

struct Floats {
  __m256 low, high;
};
struct Integers {
  __m256i low, high;
};
struct Doubles {
  __m256d low, high;
};

// ---- Helpers -----------------------------------------------------------------------------------

#define TOKENMILL_OP static TOKENMILL_INLINE

// All bits of the lanes of an 8-bit mask.
TOKENMILL_OP __m256i lanes_of(unsigned mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(mask));
  return _mm256_cmpeq_epi32(_mm256_and_si256(all, bits), bits);
}
TOKENMILL_OP Integers wide_lanes(unsigned mask) {
  return {lanes_of(mask & 0xff), lanes_of(mask >> 8)};
}

// Whether it is known while compiling that all lanes are meant.
#define TOKENMILL_ALL_LANES(mask) (__builtin_constant_p(mask) && (mask) == 0xffff)

// The 16 bits of each word that a mask of every second lane means.
TOKENMILL_OP __m256i half_words(unsigned mask) {
  return _mm256_set1_epi32(static_cast<int>((mask & 1u) != 0 ? 0x0000ffffu : 0xffff0000u));
}

// Eight floats to bf16, in the low halves of words: to the nearest, ties to even.
TOKENMILL_OP __m256i bf16_words(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  return _mm256_srli_epi32(chosen, 16);
}

// Sixteen words below 2^16 to 16 bits, in order.
TOKENMILL_OP __m256i pack_words(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

TOKENMILL_OP __m128 upper(__m256 x) { return _mm256_extractf128_ps(x, 1); }

TOKENMILL_OP __m256i mullo_epi64(__m256i a, __m256i b) {
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b),
                                         _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(cross, 32));
}

// 2^n for whole n in [-125, 126].
TOKENMILL_OP __m256 power_of_two(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

TOKENMILL_OP __m256 scalef(__m256 x, __m256 n) {
  const __m256 within = _mm256_min_ps(_mm256_set1_ps(250.0f),
                                      _mm256_max_ps(_mm256_set1_ps(-250.0f), n));
  const __m256 half = _mm256_round_ps(_mm256_mul_ps(within, _mm256_set1_ps(0.5f)),
                                      _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m256 rest = _mm256_sub_ps(within, half);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(rest));
}

template <int Predicate>
TOKENMILL_OP __mmask16 compare(const Floats& a, const Floats& b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, Predicate));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, Predicate));
  return static_cast<__mmask16>(low | high << 8);
}

template <int Mode>
TOKENMILL_OP Floats round_floats(const Floats& x) {
  return {_mm256_round_ps(x.low, Mode), _mm256_round_ps(x.high, Mode)};
}

// ---- Both halves alike -------------------------------------------------------------------------

#define TOKENMILL_UNARY(Result, name, Type, op) \
  TOKENMILL_OP Result wide_##name(const Type& x) { return {op(x.low), op(x.high)}; }
#define TOKENMILL_BINARY(Result, name, Type, op)                    \
  TOKENMILL_OP Result wide_##name(const Type& a, const Type& b) {   \
    return {op(a.low, b.low), op(a.high, b.high)};                  \
  }
#define TOKENMILL_TERNARY(name, op)                                                     \
  TOKENMILL_OP Floats wide_##name(const Floats& a, const Floats& b, const Floats& c) {  \
    return {op(a.low, b.low, c.low), op(a.high, b.high, c.high)};                       \
  }

TOKENMILL_BINARY(Floats, add_ps, Floats, _mm256_add_ps)
TOKENMILL_BINARY(Floats, sub_ps, Floats, _mm256_sub_ps)
TOKENMILL_BINARY(Floats, mul_ps, Floats, _mm256_mul_ps)
TOKENMILL_BINARY(Floats, div_ps, Floats, _mm256_div_ps)
TOKENMILL_BINARY(Floats, max_ps, Floats, _mm256_max_ps)
TOKENMILL_BINARY(Floats, min_ps, Floats, _mm256_min_ps)
TOKENMILL_BINARY(Floats, scalef_ps, Floats, scalef)
TOKENMILL_TERNARY(fmadd_ps, _mm256_fmadd_ps)
TOKENMILL_TERNARY(fmsub_ps, _mm256_fmsub_ps)
TOKENMILL_TERNARY(fnmadd_ps, _mm256_fnmadd_ps)
TOKENMILL_BINARY(Integers, xor_si512, Integers, _mm256_xor_si256)
TOKENMILL_BINARY(Integers, add_epi64, Integers, _mm256_add_epi64)
TOKENMILL_BINARY(Integers, max_epu32, Integers, _mm256_max_epu32)
TOKENMILL_BINARY(Integers, mullo_epi64, Integers, mullo_epi64)
TOKENMILL_BINARY(Integers, sllv_epi64, Integers, _mm256_sllv_epi64)
TOKENMILL_BINARY(Doubles, add_pd, Doubles, _mm256_add_pd)
TOKENMILL_UNARY(Integers, castps_si512, Floats, _mm256_castps_si256)
TOKENMILL_UNARY(Floats, castsi512_ps, Integers, _mm256_castsi256_ps)
TOKENMILL_UNARY(Integers, cvtps_epi32, Floats, _mm256_cvtps_epi32)
TOKENMILL_UNARY(Floats, cvtepi32_ps, Integers, _mm256_cvtepi32_ps)

#undef TOKENMILL_UNARY
#undef TOKENMILL_BINARY
#undef TOKENMILL_TERNARY

TOKENMILL_OP Floats wide_abs_ps(const Floats& x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
TOKENMILL_OP Integers wide_slli_epi32(const Integers& x, int count) {
  return {_mm256_slli_epi32(x.low, count), _mm256_slli_epi32(x.high, count)};
}
TOKENMILL_OP Integers wide_srli_epi64(const Integers& x, int count) {
  return {_mm256_srli_epi64(x.low, count), _mm256_srli_epi64(x.high, count)};
}

// ---- Constants ---------------------------------------------------------------------------------

TOKENMILL_OP Floats wide_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TOKENMILL_OP Floats wide_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TOKENMILL_OP Doubles wide_setzero_pd() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
TOKENMILL_OP Integers wide_setzero_si512() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
TOKENMILL_OP Integers wide_set1_epi32(int x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
TOKENMILL_OP Integers wide_set1_epi64(std::uint64_t x) {
  const __m256i all = _mm256_set1_epi64x(static_cast<long long>(x));
  return {all, all};
}
TOKENMILL_OP Integers wide_setr_epi64(long long a, long long b, long long c, long long d,
                                      long long e, long long f, long long g, long long h) {
  return {_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)};
}
TOKENMILL_OP Integers wide_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                      int j, int k, int l, int m, int n, int o, int p) {
  return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}

// ---- Memory ------------------------------------------------------------------------------------

TOKENMILL_OP Floats wide_loadu_ps(const void* data) {
  const float* values = static_cast<const float*>(data);
  return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}
TOKENMILL_OP void wide_storeu_ps(void* data, const Floats& x) {
  float* values = static_cast<float*>(data);
  _mm256_storeu_ps(values, x.low);
  _mm256_storeu_ps(values + 8, x.high);
}
TOKENMILL_OP Floats wide_maskz_loadu_ps(__mmask16 mask, const void* data) {
  if (TOKENMILL_ALL_LANES(mask)) return wide_loadu_ps(data);
  const float* values = static_cast<const float*>(data);
  const Integers lanes = wide_lanes(mask);
  return {_mm256_maskload_ps(values, lanes.low), _mm256_maskload_ps(values + 8, lanes.high)};
}
TOKENMILL_OP Floats wide_mask_loadu_ps(const Floats& otherwise, __mmask16 mask, const void* data) {
  if (TOKENMILL_ALL_LANES(mask)) return wide_loadu_ps(data);
  const Integers lanes = wide_lanes(mask);
  const Floats loaded = wide_maskz_loadu_ps(mask, data);
  return {_mm256_blendv_ps(otherwise.low, loaded.low, _mm256_castsi256_ps(lanes.low)),
          _mm256_blendv_ps(otherwise.high, loaded.high, _mm256_castsi256_ps(lanes.high))};
}
TOKENMILL_OP void wide_mask_storeu_ps(void* data, __mmask16 mask, const Floats& x) {
  if (TOKENMILL_ALL_LANES(mask)) return wide_storeu_ps(data, x);
  float* values = static_cast<float*>(data);
  const Integers lanes = wide_lanes(mask);
  _mm256_maskstore_ps(values, lanes.low, x.low);
  _mm256_maskstore_ps(values + 8, lanes.high, x.high);
}
TOKENMILL_OP Integers wide_loadu_si512(const void* data) {
  const __m256i* halves = static_cast<const __m256i*>(data);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
TOKENMILL_OP void wide_storeu_si512(void* data, const Integers& x) {
  __m256i* halves = static_cast<__m256i*>(data);
  _mm256_storeu_si256(halves, x.low);
  _mm256_storeu_si256(halves + 1, x.high);
}
// Sixteen 16-bit values; with a mask, the first ones.
TOKENMILL_OP __m256i half_maskz_loadu_epi16(__mmask16 mask, const void* data) {
  if (mask == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(data));
  alignas(32) std::uint16_t values[16] = {};
  std::memcpy(values, data, sizeof(std::uint16_t) * __builtin_popcount(mask));
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}
TOKENMILL_OP void half_mask_storeu_epi16(void* data, __mmask16 mask, __m256i x) {
  if (mask == 0xffff) return _mm256_storeu_si256(static_cast<__m256i*>(data), x);
  alignas(32) std::uint16_t values[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), x);
  std::memcpy(data, values, sizeof(std::uint16_t) * __builtin_popcount(mask));
}
// Masks of every second lane; what lies between is neither read nor written.
TOKENMILL_OP void half_mask_storeu_epi8(void* data, unsigned mask, __m256i x) {
  alignas(32) std::uint8_t values[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), x);
  auto* target = static_cast<std::uint8_t*>(data);
  for (int i = (mask & 1u) != 0 ? 0 : 1; i < 32; i += 2) target[i] = values[i];
}
TOKENMILL_OP void wide_mask_storeu_epi16(void* data, unsigned mask, const Integers& x) {
  alignas(64) std::uint16_t values[32];
  wide_storeu_si512(values, x);
  auto* target = static_cast<std::uint16_t*>(data);
  for (int i = (mask & 1u) != 0 ? 0 : 1; i < 32; i += 2) target[i] = values[i];
}
TOKENMILL_OP Integers wide_maskz_mov_epi16(unsigned mask, const Integers& x) {
  return {_mm256_and_si256(x.low, half_words(mask)), _mm256_and_si256(x.high, half_words(mask))};
}
TOKENMILL_OP Integers wide_maskz_loadu_epi16(unsigned mask, const void* data) {
  return wide_maskz_mov_epi16(mask, wide_loadu_si512(data));
}
TOKENMILL_OP void half_scatter(void* data, __m256i places, __m256i words) {
  alignas(32) std::int32_t at[8], values[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(at), places);
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), words);
  for (int i = 0; i < 8; ++i) std::memcpy(static_cast<char*>(data) + 4 * at[i], values + i, 4);
}
TOKENMILL_OP void wide_scatter(void* data, const Integers& places, const Integers& words) {
  half_scatter(data, places.low, words.low);
  half_scatter(data, places.high, words.high);
}

// ---- Across lanes ------------------------------------------------------------------------------

TOKENMILL_OP float wide_reduce_max_ps(const Floats& x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), upper(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
TOKENMILL_OP float wide_reduce_add_ps(const Floats& x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), upper(eight));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TOKENMILL_OP std::uint32_t wide_reduce_max_epu32(const Integers& x) {
  const __m256i eight = _mm256_max_epu32(x.low, x.high);
  const __m128i four =
      _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  const __m128i one = _mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(one));
}
TOKENMILL_OP double wide_reduce_add_pd(const Doubles& x) {
  const __m256d four = _mm256_add_pd(x.low, x.high);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
TOKENMILL_OP Floats wide_maskz_compress_ps(__mmask16 mask, const Floats& x) {
  alignas(32) float values[16], kept[17] = {};
  wide_storeu_ps(values, x);
  int count = 0;
  for (int i = 0; i < 16; ++i) {
    kept[count] = values[i];
    count += mask >> i & 1;
  }
  return wide_loadu_ps(kept);
}

// ---- With masks --------------------------------------------------------------------------------

TOKENMILL_OP Integers wide_maskz_add_epi32(__mmask16 mask, const Integers& a, const Integers& b) {
  const Integers lanes = wide_lanes(mask);
  return {_mm256_and_si256(lanes.low, _mm256_add_epi32(a.low, b.low)),
          _mm256_and_si256(lanes.high, _mm256_add_epi32(a.high, b.high))};
}
TOKENMILL_OP Floats wide_maskz_mul_ps(__mmask16 mask, const Floats& a, const Floats& b) {
  const Floats lanes = wide_castsi512_ps(wide_lanes(mask));
  return {_mm256_and_ps(lanes.low, _mm256_mul_ps(a.low, b.low)),
          _mm256_and_ps(lanes.high, _mm256_mul_ps(a.high, b.high))};
}
TOKENMILL_OP Floats wide_maskz_sub_ps(__mmask16 mask, const Floats& a, const Floats& b) {
  const Floats lanes = wide_castsi512_ps(wide_lanes(mask));
  return {_mm256_and_ps(lanes.low, _mm256_sub_ps(a.low, b.low)),
          _mm256_and_ps(lanes.high, _mm256_sub_ps(a.high, b.high))};
}
TOKENMILL_OP __mmask8 wide_cmpge_epu64_mask(const Integers& a, const Integers& b) {
  const __m256i sign = _mm256_set1_epi64x(static_cast<long long>(0x8000000000000000ull));
  const auto less = [sign](__m256i x, __m256i y) {
    const __m256i is_less =
        _mm256_cmpgt_epi64(_mm256_xor_si256(y, sign), _mm256_xor_si256(x, sign));
    return _mm256_movemask_pd(_mm256_castsi256_pd(is_less));
  };
  return static_cast<__mmask8>(~(less(a.low, b.low) | less(a.high, b.high) << 4));
}

// ---- Conversions -------------------------------------------------------------------------------

TOKENMILL_OP Integers wide_cvtepu16_epi32(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
TOKENMILL_OP Integers wide_cvtepi8_epi16(__m256i x) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1))};
}
TOKENMILL_OP Integers wide_cvtepi32_epi64(__m256i x) {
  return {_mm256_cvtepi32_epi64(_mm256_castsi256_si128(x)),
          _mm256_cvtepi32_epi64(_mm256_extracti128_si256(x, 1))};
}
TOKENMILL_OP Doubles wide_cvtps_pd(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(upper(x))};
}
TOKENMILL_OP __m256i wide_cvtepi32_epi16(const Integers& x) {
  const __m256i low_half = _mm256_set1_epi32(0xffff);
  return pack_words(_mm256_and_si256(x.low, low_half), _mm256_and_si256(x.high, low_half));
}
TOKENMILL_OP __m128i wide_cvtsepi32_epi8(const Integers& x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
TOKENMILL_OP __m256i wide_cvtneps_pbh(const Floats& x) {
  return pack_words(bf16_words(x.low), bf16_words(x.high));
}
TOKENMILL_OP Integers wide_cvtne2ps_pbh(const Floats& high, const Floats& low) {
  return {wide_cvtneps_pbh(low), wide_cvtneps_pbh(high)};
}

// ---- Products of pairs -------------------------------------------------------------------------

TOKENMILL_OP __m256 dpbf16(__m256 sum, __m256i a, __m256i b) {
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 first = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                                       _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, upper_half)),
                         _mm256_castsi256_ps(_mm256_and_si256(b, upper_half)), first);
}
TOKENMILL_OP Floats wide_dpbf16_ps(const Floats& sum, const Integers& a, const Integers& b) {
  return {dpbf16(sum.low, a.low, b.low), dpbf16(sum.high, a.high, b.high)};
}
TOKENMILL_OP Integers wide_dpwssd_epi32(const Integers& sum, const Integers& a, const Integers& b) {
  return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
          _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
}

#undef TOKENMILL_OP

}  // namespace
}  // namespace tokenmill

// ---- The names that the sources use ------------------------------------------------------------

#define TOKENMILL_WIDE_REGISTERS 8  // so many there are
#define _mm512_castsi512_si256(x) ((x).low)
#define _mm512_castps512_ps256(x) ((x).low)
#define _mm512_extractf32x8_ps(x, half) ((half) != 0 ? (x).high : (x).low)
#define _mm512_extracti32x8_epi32(x, half) ((half) != 0 ? (x).high : (x).low)
#include "register_names.h"
