// AVX-512's registers and operations, made of four vectors of 128 bits each, so that the sources
// written for it run on any processor: a _portable.cpp file includes this first and then the source
// of its _avx512.cpp. Only what these sources use is here. Operations give what AVX-512's do, except:
//   multiply-adds             rounded twice where the processor has none
//   sums of all lanes         in an order of their own
//   bf16 products             two multiply-adds
//   scalef                    2^n for n in [-250, 250]; beyond it, as at these
//   floats to integers        of at most 2^31 in magnitude
//   masks of 16-bit lanes     all, the first ones, or every second one, as said
#pragma once

#include "portable_values.h"

namespace tokenmill {
namespace {

#define TOKENMILL_OP static TOKENMILL_INLINE

// ---- Memory ------------------------------------------------------------------------------------

TOKENMILL_OP Floats wide_loadu_ps(const void* data) {
  const auto* values = static_cast<const float*>(data);
  return {load_as<F32x4>(values), load_as<F32x4>(values + 4), load_as<F32x4>(values + 8),
          load_as<F32x4>(values + 12)};
}
TOKENMILL_OP void wide_storeu_ps(void* data, const Floats& x) {
  auto* values = static_cast<float*>(data);
  store_as(values, x.a);
  store_as(values + 4, x.b);
  store_as(values + 8, x.c);
  store_as(values + 12, x.d);
}
// Only lanes of the mask are read, or written.
TOKENMILL_OP F32x4 load_lanes(F32x4 otherwise, unsigned mask, const float* values) {
  if (mask == 0xf) return load_as<F32x4>(values);
  for (int i = 0; i < 4; ++i)
    if ((mask >> i & 1) != 0) otherwise[i] = values[i];
  return otherwise;
}
TOKENMILL_OP void store_lanes(float* values, unsigned mask, F32x4 x) {
  if (mask == 0xf) return store_as(values, x);
  for (int i = 0; i < 4; ++i)
    if ((mask >> i & 1) != 0) values[i] = x[i];
}
TOKENMILL_OP Floats wide_mask_loadu_ps(const Floats& otherwise, __mmask16 mask, const void* data) {
  if (mask == 0xffff) return wide_loadu_ps(data);
  const auto* values = static_cast<const float*>(data);
  return {load_lanes(otherwise.a, mask & 0xf, values),
          load_lanes(otherwise.b, mask >> 4 & 0xf, values + 4),
          load_lanes(otherwise.c, mask >> 8 & 0xf, values + 8),
          load_lanes(otherwise.d, mask >> 12, values + 12)};
}
TOKENMILL_OP Floats wide_maskz_loadu_ps(__mmask16 mask, const void* data) {
  return wide_mask_loadu_ps(Floats{}, mask, data);
}
TOKENMILL_OP void wide_mask_storeu_ps(void* data, __mmask16 mask, const Floats& x) {
  if (mask == 0xffff) return wide_storeu_ps(data, x);
  auto* values = static_cast<float*>(data);
  store_lanes(values, mask & 0xf, x.a);
  store_lanes(values + 4, mask >> 4 & 0xf, x.b);
  store_lanes(values + 8, mask >> 8 & 0xf, x.c);
  store_lanes(values + 12, mask >> 12, x.d);
}
TOKENMILL_OP Integers wide_loadu_si512(const void* data) {
  const auto* words = static_cast<const std::int32_t*>(data);
  return {load_as<I32x4>(words), load_as<I32x4>(words + 4), load_as<I32x4>(words + 8),
          load_as<I32x4>(words + 12)};
}
TOKENMILL_OP void wide_storeu_si512(void* data, const Integers& x) {
  auto* words = static_cast<std::int32_t*>(data);
  store_as(words, x.a);
  store_as(words + 4, x.b);
  store_as(words + 8, x.c);
  store_as(words + 12, x.d);
}
TOKENMILL_OP HalfIntegers half_loadu_si256(const void* data) {
  const auto* words = static_cast<const std::int32_t*>(data);
  return {load_as<I32x4>(words), load_as<I32x4>(words + 4)};
}
TOKENMILL_OP void half_storeu_si256(void* data, const HalfIntegers& x) {
  auto* words = static_cast<std::int32_t*>(data);
  store_as(words, x.low);
  store_as(words + 4, x.high);
}
// Sixteen 16-bit values; with a mask, the first ones.
TOKENMILL_OP HalfIntegers half_maskz_loadu_epi16(__mmask16 mask, const void* data) {
  if (mask == 0xffff) return half_loadu_si256(data);
  std::uint16_t values[16] = {};
  std::memcpy(values, data, sizeof(std::uint16_t) * __builtin_popcount(mask));
  return half_loadu_si256(values);
}
TOKENMILL_OP void half_mask_storeu_epi16(void* data, __mmask16 mask, const HalfIntegers& x) {
  if (mask == 0xffff) return half_storeu_si256(data, x);
  std::uint16_t values[16];
  half_storeu_si256(values, x);
  std::memcpy(data, values, sizeof(std::uint16_t) * __builtin_popcount(mask));
}
// Masks of every second lane; what lies between is neither read nor written.
TOKENMILL_OP void half_mask_storeu_epi8(void* data, unsigned mask, const HalfIntegers& x) {
  std::uint8_t values[32];
  half_storeu_si256(values, x);
  auto* target = static_cast<std::uint8_t*>(data);
  for (int i = (mask & 1u) != 0 ? 0 : 1; i < 32; i += 2) target[i] = values[i];
}
TOKENMILL_OP void wide_mask_storeu_epi16(void* data, unsigned mask, const Integers& x) {
  std::uint16_t values[32];
  wide_storeu_si512(values, x);
  auto* target = static_cast<std::uint16_t*>(data);
  for (int i = (mask & 1u) != 0 ? 0 : 1; i < 32; i += 2) target[i] = values[i];
}
TOKENMILL_OP Integers wide_maskz_mov_epi16(unsigned mask, const Integers& x) {
  const I32x4 kept = splat(static_cast<std::int32_t>((mask & 1u) != 0 ? 0x0000ffffu : 0xffff0000u));
  return {x.a & kept, x.b & kept, x.c & kept, x.d & kept};
}
TOKENMILL_OP Integers wide_maskz_loadu_epi16(unsigned mask, const void* data) {
  return wide_maskz_mov_epi16(mask, wide_loadu_si512(data));
}
TOKENMILL_OP void half_scatter(void* data, const HalfIntegers& places, const HalfIntegers& words) {
  for (int i = 0; i < 4; ++i) {
    const std::int32_t low = words.low[i], high = words.high[i];
    std::memcpy(static_cast<char*>(data) + 4 * places.low[i], &low, 4);
    std::memcpy(static_cast<char*>(data) + 4 * places.high[i], &high, 4);
  }
}
TOKENMILL_OP void wide_scatter(void* data, const Integers& places, const Integers& words) {
  half_scatter(data, {places.a, places.b}, {words.a, words.b});
  half_scatter(data, {places.c, places.d}, {words.c, words.d});
}

// ---- Across lanes ------------------------------------------------------------------------------

TOKENMILL_OP float wide_reduce_max_ps(const Floats& x) {
  const F32x4 four = larger(larger(x.a, x.c), larger(x.b, x.d));
  const F32x4 two = larger(four, __builtin_shuffle(four, I32x4{2, 3, 0, 1}));
  return larger(two, __builtin_shuffle(two, I32x4{1, 0, 3, 2}))[0];
}
TOKENMILL_OP float wide_reduce_add_ps(const Floats& x) {
  const F32x4 four = (x.a + x.c) + (x.b + x.d);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
TOKENMILL_OP std::uint32_t wide_reduce_max_epu32(const Integers& x) {
  const I32x4 four = largest_word(largest_word(x.a, x.c), largest_word(x.b, x.d));
  const I32x4 two = largest_word(four, __builtin_shuffle(four, I32x4{2, 3, 0, 1}));
  return static_cast<std::uint32_t>(
      largest_word(two, __builtin_shuffle(two, I32x4{1, 0, 3, 2}))[0]);
}
TOKENMILL_OP double wide_reduce_add_pd(const Doubles& x) {
  const F64x2 two = (x.a + x.c) + (x.b + x.d);
  return two[0] + two[1];
}
// Lanes behind the kept ones are zeros.
TOKENMILL_OP Floats wide_maskz_compress_ps(__mmask16 mask, const Floats& x) {
  float values[16], kept[17] = {};
  wide_storeu_ps(values, x);
  int count = 0;
  for (int i = 0; i < 16; ++i) {
    kept[count] = values[i];
    count += mask >> i & 1;
  }
  kept[count] = 0.0f;
  return wide_loadu_ps(kept);
}

// ---- With masks --------------------------------------------------------------------------------

template <int Predicate>
TOKENMILL_OP unsigned compare(F32x4 a, F32x4 b) {
  switch (Predicate) {
    case _CMP_EQ_OQ: return mask_of(a == b);
    case _CMP_LT_OQ: return mask_of(a < b);
    case _CMP_GT_OQ: return mask_of(a > b);
    case _CMP_GE_OQ: return mask_of(a >= b);
    case _CMP_NEQ_UQ: return mask_of(a != b);
    case _CMP_NLT_UQ: return mask_of(~(a < b));
    default: return mask_of((a != a) | (b != b));  // _CMP_UNORD_Q
  }
}
template <int Predicate>
TOKENMILL_OP __mmask16 compare(const Floats& x, const Floats& y) {
  return static_cast<__mmask16>(compare<Predicate>(x.a, y.a) | compare<Predicate>(x.b, y.b) << 4 |
                                compare<Predicate>(x.c, y.c) << 8 |
                                compare<Predicate>(x.d, y.d) << 12);
}
TOKENMILL_OP Integers wide_lanes(unsigned mask) {
  return {lanes_of(mask), lanes_of(mask >> 4), lanes_of(mask >> 8), lanes_of(mask >> 12)};
}
TOKENMILL_OP Integers wide_maskz_add_epi32(__mmask16 mask, const Integers& x, const Integers& y) {
  const Integers lanes = wide_lanes(mask);
  return {lanes.a & (x.a + y.a), lanes.b & (x.b + y.b), lanes.c & (x.c + y.c),
          lanes.d & (x.d + y.d)};
}
TOKENMILL_OP Floats kept_lanes(__mmask16 mask, const Floats& x) {
  const Integers lanes = wide_lanes(mask);
  const auto kept = [](I32x4 lane, F32x4 value) {
    return bits_as<F32x4>(lane & bits_as<I32x4>(value));
  };
  return {kept(lanes.a, x.a), kept(lanes.b, x.b), kept(lanes.c, x.c), kept(lanes.d, x.d)};
}
TOKENMILL_OP Floats wide_maskz_mul_ps(__mmask16 mask, const Floats& x, const Floats& y) {
  return kept_lanes(mask, {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d});
}
TOKENMILL_OP Floats wide_maskz_sub_ps(__mmask16 mask, const Floats& x, const Floats& y) {
  return kept_lanes(mask, {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d});
}
TOKENMILL_OP __mmask8 wide_cmpge_epu64_mask(const Integers& x, const Integers& y) {
  const auto reached = [](I32x4 a, I32x4 b) {
    const U64x2 left = bits_as<U64x2>(a), right = bits_as<U64x2>(b);
    return static_cast<unsigned>(left[0] >= right[0]) | (left[1] >= right[1] ? 2u : 0u);
  };
  return static_cast<__mmask8>(reached(x.a, y.a) | reached(x.b, y.b) << 2 |
                               reached(x.c, y.c) << 4 | reached(x.d, y.d) << 6);
}

// ---- Conversions -------------------------------------------------------------------------------

TOKENMILL_OP Integers wide_cvtepu16_epi32(const HalfIntegers& x) {
  const U16x8 low = bits_as<U16x8>(x.low), high = bits_as<U16x8>(x.high);
  return {widen_low(low), widen_high(low), widen_low(high), widen_high(high)};
}
TOKENMILL_OP Integers wide_cvtepi8_epi16(const HalfIntegers& x) {
  const I8x16 low = bits_as<I8x16>(x.low), high = bits_as<I8x16>(x.high);
  return {bits_as<I32x4>(extend_low(low)), bits_as<I32x4>(extend_high(low)),
          bits_as<I32x4>(extend_low(high)), bits_as<I32x4>(extend_high(high))};
}
TOKENMILL_OP Integers wide_cvtepi32_epi64(const HalfIntegers& x) {
  const auto low = [](I32x4 v) { return bits_as<I32x4>(I64x2{v[0], v[1]}); };
  const auto high = [](I32x4 v) { return bits_as<I32x4>(I64x2{v[2], v[3]}); };
  return {low(x.low), high(x.low), low(x.high), high(x.high)};
}
TOKENMILL_OP Doubles wide_cvtps_pd(const HalfFloats& x) {
  return {doubles_low(x.low), doubles_high(x.low), doubles_low(x.high), doubles_high(x.high)};
}
TOKENMILL_OP HalfIntegers pack_words(const Integers& x) {
  return {bits_as<I32x4>(lower_halves(x.a, x.b)), bits_as<I32x4>(lower_halves(x.c, x.d))};
}
TOKENMILL_OP HalfIntegers wide_cvtepi32_epi16(const Integers& x) { return pack_words(x); }
TOKENMILL_OP I32x4 wide_cvtsepi32_epi8(const Integers& x) {
  I8x16 bytes;
  const auto limited = [](std::int32_t value) {
    return static_cast<std::int8_t>(value < -128 ? -128 : value > 127 ? 127 : value);
  };
  for (int i = 0; i < 4; ++i) {
    bytes[i] = limited(x.a[i]);
    bytes[i + 4] = limited(x.b[i]);
    bytes[i + 8] = limited(x.c[i]);
    bytes[i + 12] = limited(x.d[i]);
  }
  return bits_as<I32x4>(bytes);
}
TOKENMILL_OP HalfIntegers wide_cvtneps_pbh(const Floats& x) {
  return pack_words({bf16_words(x.a), bf16_words(x.b), bf16_words(x.c), bf16_words(x.d)});
}
TOKENMILL_OP Integers wide_cvtne2ps_pbh(const Floats& high, const Floats& low) {
  const HalfIntegers first = wide_cvtneps_pbh(low), second = wide_cvtneps_pbh(high);
  return {first.low, first.high, second.low, second.high};
}
TOKENMILL_OP HalfIntegers half_cvtepu8_epi16(I32x4 x) {
  const U8x16 bytes = bits_as<U8x16>(x);
  return {bits_as<I32x4>(__builtin_shuffle(bytes, U8x16{}, U8x16{0, 16, 1, 16, 2, 16, 3, 16, 4, 16,
                                                                 5, 16, 6, 16, 7, 16})),
          bits_as<I32x4>(__builtin_shuffle(bytes, U8x16{}, U8x16{8, 16, 9, 16, 10, 16, 11, 16, 12,
                                                                 16, 13, 16, 14, 16, 15, 16}))};
}
TOKENMILL_OP HalfIntegers half_slli_epi16(const HalfIntegers& x, int count) {
  return {bits_as<I32x4>(bits_as<U16x8>(x.low) << count),
          bits_as<I32x4>(bits_as<U16x8>(x.high) << count)};
}
TOKENMILL_OP HalfIntegers half_add_epi32(const HalfIntegers& x, const HalfIntegers& y) {
  return {x.low + y.low, x.high + y.high};
}
// Of each vector of 128 bits by itself.
TOKENMILL_OP HalfIntegers half_unpacklo_epi32(const HalfIntegers& x, const HalfIntegers& y) {
  constexpr I32x4 kOrder = {0, 4, 1, 5};
  return {__builtin_shuffle(x.low, y.low, kOrder), __builtin_shuffle(x.high, y.high, kOrder)};
}
TOKENMILL_OP HalfIntegers half_unpackhi_epi32(const HalfIntegers& x, const HalfIntegers& y) {
  constexpr I32x4 kOrder = {2, 6, 3, 7};
  return {__builtin_shuffle(x.low, y.low, kOrder), __builtin_shuffle(x.high, y.high, kOrder)};
}
TOKENMILL_OP HalfIntegers half_unpacklo_epi64(const HalfIntegers& x, const HalfIntegers& y) {
  constexpr I32x4 kOrder = {0, 1, 4, 5};
  return {__builtin_shuffle(x.low, y.low, kOrder), __builtin_shuffle(x.high, y.high, kOrder)};
}
TOKENMILL_OP HalfIntegers half_unpackhi_epi64(const HalfIntegers& x, const HalfIntegers& y) {
  constexpr I32x4 kOrder = {2, 3, 6, 7};
  return {__builtin_shuffle(x.low, y.low, kOrder), __builtin_shuffle(x.high, y.high, kOrder)};
}
TOKENMILL_OP HalfIntegers half_shufflelo_epi16(const HalfIntegers& x, unsigned order) {
  const auto at = [order](int i) { return static_cast<std::uint16_t>(order >> 2 * i & 3); };
  const U16x8 mask = {at(0), at(1), at(2), at(3), 4, 5, 6, 7};
  return {bits_as<I32x4>(__builtin_shuffle(bits_as<U16x8>(x.low), mask)),
          bits_as<I32x4>(__builtin_shuffle(bits_as<U16x8>(x.high), mask))};
}
TOKENMILL_OP HalfIntegers half_shufflehi_epi16(const HalfIntegers& x, unsigned order) {
  const auto at = [order](int i) { return static_cast<std::uint16_t>(4 + (order >> 2 * i & 3)); };
  const U16x8 mask = {0, 1, 2, 3, at(0), at(1), at(2), at(3)};
  return {bits_as<I32x4>(__builtin_shuffle(bits_as<U16x8>(x.low), mask)),
          bits_as<I32x4>(__builtin_shuffle(bits_as<U16x8>(x.high), mask))};
}
TOKENMILL_OP HalfIntegers half_shuffle_epi8(const HalfIntegers& x, const HalfIntegers& order) {
  const auto shuffled = [](I32x4 values, I32x4 by) {
    return bits_as<I32x4>(__builtin_shuffle(bits_as<U8x16>(values), bits_as<U8x16>(by)));
  };
  return {shuffled(x.low, order.low), shuffled(x.high, order.high)};
}
template <class... Bytes>
TOKENMILL_OP HalfIntegers half_setr_epi8(Bytes... bytes) {
  static_assert(sizeof...(Bytes) == 32);
  const std::int8_t all[] = {static_cast<std::int8_t>(bytes)...};
  return half_loadu_si256(all);
}
// The lower vectors of both, or the upper ones.
template <int Halves>
TOKENMILL_OP HalfIntegers half_permute2x128(const HalfIntegers& x, const HalfIntegers& y) {
  static_assert(Halves == 0x20 || Halves == 0x31);
  return Halves == 0x20 ? HalfIntegers{x.low, y.low} : HalfIntegers{x.high, y.high};
}
TOKENMILL_OP HalfIntegers lower_integers(const Integers& x) { return {x.a, x.b}; }
TOKENMILL_OP HalfIntegers upper_integers(const Integers& x) { return {x.c, x.d}; }
TOKENMILL_OP HalfFloats lower_floats(const Floats& x) { return {x.a, x.b}; }
TOKENMILL_OP HalfFloats upper_floats(const Floats& x) { return {x.c, x.d}; }

// ---- Products of pairs -------------------------------------------------------------------------

TOKENMILL_OP Floats wide_dpbf16_ps(const Floats& sum, const Integers& x, const Integers& y) {
  const auto added = [](F32x4 part, I32x4 a, I32x4 b) TOKENMILL_INLINE_LAMBDA {
    return multiply_add(odd_values(a), odd_values(b),
                        multiply_add(even_values(a), even_values(b), part));
  };
  return {added(sum.a, x.a, y.a), added(sum.b, x.b, y.b), added(sum.c, x.c, y.c),
          added(sum.d, x.d, y.d)};
}
TOKENMILL_OP Integers wide_dpwssd_epi32(const Integers& sum, const Integers& x, const Integers& y) {
  const auto added = [](I32x4 part, I32x4 a, I32x4 b) TOKENMILL_INLINE_LAMBDA {
    return part + multiply_pairs(bits_as<I16x8>(a), bits_as<I16x8>(b));
  };
  return {added(sum.a, x.a, y.a), added(sum.b, x.b, y.b), added(sum.c, x.c, y.c),
          added(sum.d, x.d, y.d)};
}

#undef TOKENMILL_OP

}  // namespace
}  // namespace tokenmill

// ---- The names that the sources use ------------------------------------------------------------

#if defined(__ARM_NEON)
#define TOKENMILL_WIDE_REGISTERS 8  // so many there are
#else
#define TOKENMILL_WIDE_REGISTERS 4
#endif
#define _mm512_castsi512_si256 ::tokenmill::lower_integers
#define _mm512_castps512_ps256 ::tokenmill::lower_floats
#define _mm512_extractf32x8_ps(x, half) \
  ((half) != 0 ? ::tokenmill::upper_floats(x) : ::tokenmill::lower_floats(x))
#define _mm512_extracti32x8_epi32(x, half) \
  ((half) != 0 ? ::tokenmill::upper_integers(x) : ::tokenmill::lower_integers(x))

#undef _mm256_shufflelo_epi16
#undef _mm256_shufflehi_epi16
#undef _mm256_permute2x128_si256
#define __m256i ::tokenmill::HalfIntegers
#define __m128i ::tokenmill::I32x4
#define _mm256_loadu_si256 ::tokenmill::half_loadu_si256
#define _mm256_storeu_si256 ::tokenmill::half_storeu_si256
#define _mm256_cvtepu8_epi16 ::tokenmill::half_cvtepu8_epi16
#define _mm256_slli_epi16 ::tokenmill::half_slli_epi16
#define _mm256_add_epi32 ::tokenmill::half_add_epi32
#define _mm256_setr_epi32 ::tokenmill::half_setr_epi32
#define _mm256_set1_epi32 ::tokenmill::half_set1_epi32
#define _mm256_unpacklo_epi32 ::tokenmill::half_unpacklo_epi32
#define _mm256_unpackhi_epi32 ::tokenmill::half_unpackhi_epi32
#define _mm256_unpacklo_epi64 ::tokenmill::half_unpacklo_epi64
#define _mm256_unpackhi_epi64 ::tokenmill::half_unpackhi_epi64
#define _mm256_shufflelo_epi16 ::tokenmill::half_shufflelo_epi16
#define _mm256_shufflehi_epi16 ::tokenmill::half_shufflehi_epi16
#define _mm256_shuffle_epi8 ::tokenmill::half_shuffle_epi8
#define _mm256_setr_epi8 ::tokenmill::half_setr_epi8
#define _mm256_permute2x128_si256(x, y, halves) ::tokenmill::half_permute2x128<halves>(x, y)
#define _mm_load_si128 ::tokenmill::load_as<::tokenmill::I32x4>
#define _mm_storeu_si128 ::tokenmill::store_as
#include "register_names.h"
