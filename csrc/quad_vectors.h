// Vectors of 128 bits in the compiler's own types, for any processor: its operators are there
// already, and this adds what they leave out. Where a processor has an instruction that compilers do
// not find by themselves, SSE2's or NEON's intrinsic stands beside the general form.
#pragma once

#include "common.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tokenmill {
namespace {  // compiled for each instruction set by itself

using F32x4 = float __attribute__((vector_size(16)));
using F64x2 = double __attribute__((vector_size(16)));
using I8x16 = std::int8_t __attribute__((vector_size(16)));
using U8x16 = std::uint8_t __attribute__((vector_size(16)));
using I16x8 = std::int16_t __attribute__((vector_size(16)));
using U16x8 = std::uint16_t __attribute__((vector_size(16)));
using I32x4 = std::int32_t __attribute__((vector_size(16)));
using U32x4 = std::uint32_t __attribute__((vector_size(16)));
using I64x2 = std::int64_t __attribute__((vector_size(16)));
using U64x2 = std::uint64_t __attribute__((vector_size(16)));

#define TOKENMILL_OP static TOKENMILL_INLINE

template <class To, class From>
TOKENMILL_OP To bits_as(From x) {
  static_assert(sizeof(To) == 16 && sizeof(From) == 16);
  return (To)x;
}
template <class V>
TOKENMILL_OP V load_as(const void* data) {
  V x;
  std::memcpy(&x, data, sizeof x);
  return x;
}
template <class V>
TOKENMILL_OP void store_as(void* data, V x) {
  std::memcpy(data, &x, sizeof x);
}

TOKENMILL_OP F32x4 splat(float x) { return F32x4{x, x, x, x}; }
TOKENMILL_OP I32x4 splat(std::int32_t x) { return I32x4{x, x, x, x}; }

// ---- Floats ------------------------------------------------------------------------------------

// The second one where either is a NaN, as x86 has it.
TOKENMILL_OP F32x4 larger(F32x4 a, F32x4 b) {
#if defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
TOKENMILL_OP F32x4 smaller(F32x4 a, F32x4 b) {
#if defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
TOKENMILL_OP U32x4 larger(U32x4 a, U32x4 b) { return a > b ? a : b; }
TOKENMILL_OP F32x4 magnitude(F32x4 x) {
  return bits_as<F32x4>(bits_as<I32x4>(x) & splat(0x7fffffff));
}

// a * b + c: rounded once if the processor can do that quickly, else twice.
TOKENMILL_OP F32x4 multiply_add(F32x4 a, F32x4 b, F32x4 c) {
#if defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

TOKENMILL_OP F64x2 doubles_low(F32x4 x) {
#if defined(__SSE2__)
  return _mm_cvtps_pd(x);
#elif defined(__ARM_NEON)
  return vcvt_f64_f32(vget_low_f32(x));
#else
  return F64x2{x[0], x[1]};
#endif
}
TOKENMILL_OP F64x2 doubles_high(F32x4 x) {
#if defined(__SSE2__)
  return _mm_cvtps_pd(_mm_movehl_ps(x, x));
#elif defined(__ARM_NEON)
  return vcvt_high_f64_f32(x);
#else
  return F64x2{x[2], x[3]};
#endif
}
TOKENMILL_OP F32x4 narrow(F64x2 low, F64x2 high) {
#if defined(__SSE2__)
  return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
#elif defined(__ARM_NEON)
  return vcvt_high_f32_f64(vcvt_f32_f64(low), high);
#else
  return F32x4{static_cast<float>(low[0]), static_cast<float>(low[1]),
               static_cast<float>(high[0]), static_cast<float>(high[1])};
#endif
}

// Bit i is lane i's.
TOKENMILL_OP unsigned mask_of(I32x4 lanes) {
#if defined(__SSE2__)
  return static_cast<unsigned>(_mm_movemask_ps((__m128)lanes));
#elif defined(__ARM_NEON)
  return vaddvq_u32(bits_as<U32x4>(lanes & I32x4{1, 2, 4, 8}));
#else
  const I32x4 bits = lanes & I32x4{1, 2, 4, 8};
  return static_cast<unsigned>(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}

// c[i] += a[i] * b[i], rounded once on every processor.
//
// Without the instruction it is computed in double precision, where the product is exact. Rounding
// that sum to a float errs only if the double lies just between two floats: then its lower 29 bits
// are a one and zeros, and the function of the library decides. That is asked once for all of them.
template <int Count>
TOKENMILL_OP void add_products_once(const F32x4 (&a)[Count], const F32x4 (&b)[Count],
                                    F32x4 (&c)[Count]) {
#if defined(__ARM_NEON) || defined(__FP_FAST_FMAF)
  for (int i = 0; i < Count; ++i) c[i] = multiply_add(a[i], b[i], c[i]);
#else
  F32x4 sums[Count];
  I32x4 are_between = {};
  for (int i = 0; i < Count; ++i) {
    const F64x2 low = doubles_low(a[i]) * doubles_low(b[i]) + doubles_low(c[i]);
    const F64x2 high = doubles_high(a[i]) * doubles_high(b[i]) + doubles_high(c[i]);
    const I32x4 lower_words = __builtin_shuffle(bits_as<I32x4>(low), bits_as<I32x4>(high),
                                                I32x4{0, 2, 4, 6});
    are_between |= (lower_words & splat(0x1fffffff)) == splat(0x10000000);
    sums[i] = narrow(low, high);
  }
  if (__builtin_expect(mask_of(are_between) != 0, 0)) {
    for (int i = 0; i < Count; ++i)
      for (int lane = 0; lane < 4; ++lane)
        c[i][lane] = __builtin_fmaf(a[i][lane], b[i][lane], c[i][lane]);
    return;
  }
  for (int i = 0; i < Count; ++i) c[i] = sums[i];
#endif
}

// To the nearest whole number, ties to even.
TOKENMILL_OP F32x4 round_nearest(F32x4 x) {
#if defined(__ARM_NEON)
  return vrndnq_f32(x);
#else
  // Floats from 2^23 on are whole: adding that much rounds, and what is larger stays as it is.
  const F32x4 shift = bits_as<F32x4>((bits_as<I32x4>(x) & splat(INT32_MIN)) |
                                     bits_as<I32x4>(splat(0x1p23f)));
  const F32x4 rounded = (x + shift) - shift;
  return magnitude(x) < splat(0x1p23f) ? rounded : x;
#endif
}
TOKENMILL_OP F32x4 round_up_whole(F32x4 x) {
#if defined(__ARM_NEON)
  return vrndpq_f32(x);
#else
  const F32x4 rounded = round_nearest(x);
  return rounded < x ? rounded + splat(1.0f) : rounded;
#endif
}

// Floats of at most 2^31 in magnitude to the nearest integer, ties to even.
TOKENMILL_OP I32x4 to_integers(F32x4 x) {
#if defined(__SSE2__)
  return bits_as<I32x4>(_mm_cvtps_epi32(x));
#elif defined(__ARM_NEON)
  return vcvtnq_s32_f32(x);
#else
  return __builtin_convertvector(round_nearest(x), I32x4);
#endif
}
TOKENMILL_OP F32x4 to_floats(I32x4 x) { return __builtin_convertvector(x, F32x4); }

// 2^n for whole n in [-125, 126].
TOKENMILL_OP F32x4 power_of_two(F32x4 n) {
  return bits_as<F32x4>((to_integers(n) + splat(127)) << 23);
}
// x 2^n for whole n; beyond 250 as at 250.
TOKENMILL_OP F32x4 scale_by_power(F32x4 x, F32x4 n) {
  const F32x4 within = smaller(splat(250.0f), larger(splat(-250.0f), n));
  const F32x4 half = round_nearest(within * splat(0.5f));
  return (x * power_of_two(half)) * power_of_two(within - half);
}

TOKENMILL_OP I32x4 lanes_of(unsigned mask) {
  const I32x4 bits = {1, 2, 4, 8};
  return (splat(static_cast<std::int32_t>(mask)) & bits) == bits;
}

// ---- Halves of words ---------------------------------------------------------------------------

TOKENMILL_OP I32x4 widen_low(U16x8 x) {
  return bits_as<I32x4>(__builtin_shuffle(x, U16x8{}, U16x8{0, 8, 1, 8, 2, 8, 3, 8}));
}
TOKENMILL_OP I32x4 widen_high(U16x8 x) {
  return bits_as<I32x4>(__builtin_shuffle(x, U16x8{}, U16x8{4, 8, 5, 8, 6, 8, 7, 8}));
}
// bf16 to floats.
TOKENMILL_OP F32x4 floats_low(U16x8 x) { return bits_as<F32x4>(widen_low(x) << 16); }
TOKENMILL_OP F32x4 floats_high(U16x8 x) { return bits_as<F32x4>(widen_high(x) << 16); }
// The same for pairs in words.
TOKENMILL_OP F32x4 even_values(I32x4 pairs) { return bits_as<F32x4>(pairs << 16); }
TOKENMILL_OP F32x4 odd_values(I32x4 pairs) {
  return bits_as<F32x4>(pairs & splat(static_cast<std::int32_t>(0xffff0000u)));
}

// The lower halves of eight words, in order.
TOKENMILL_OP U16x8 lower_halves(I32x4 low, I32x4 high) {
#if defined(__SSE2__)
  return bits_as<U16x8>(_mm_packs_epi32((__m128i)(low << 16 >> 16), (__m128i)(high << 16 >> 16)));
#else
  return __builtin_shuffle(bits_as<U16x8>(low), bits_as<U16x8>(high),
                           U16x8{0, 2, 4, 6, 8, 10, 12, 14});
#endif
}

// Floats to bf16, in the lower halves of words: to the nearest, ties to even; a NaN stays one.
TOKENMILL_OP I32x4 bf16_words(F32x4 x) {
  const U32x4 bits = bits_as<U32x4>(x);
  const U32x4 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const I32x4 is_nan = x != x;
  return bits_as<I32x4>((is_nan ? bits_as<U32x4>(bits | 0x400000u) : rounded) >> 16);
}

// Four halves of IEEE precision to floats.
TOKENMILL_OP F32x4 floats_of_halves(const fp16* data) {
#if defined(__ARM_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(data)));
#else
  std::uint64_t bits;
  std::memcpy(&bits, data, sizeof bits);
  const I32x4 halves = widen_low(bits_as<U16x8>(U64x2{bits, 0}));
  const I32x4 rest = halves & splat(0x7fff), sign = (halves & splat(0x8000)) << 16;
  const I32x4 normal = (rest << 13) + splat(112 << 23);
  // Below 2^-14 a half counts steps of 2^-24; infinities and NaNs keep the highest exponent.
  const I32x4 small = bits_as<I32x4>(to_floats(rest) * splat(0x1p-24f));
  const I32x4 special = normal + splat(112 << 23);
  const I32x4 finite = rest < splat(0x400) ? small : normal;
  return bits_as<F32x4>(sign | (rest >= splat(0x7c00) ? special : finite));
#endif
}

// ---- Products of 16 bits -----------------------------------------------------------------------

// a0 b0 + a1 b1, a2 b2 + a3 b3, ... in 32 bits.
TOKENMILL_OP I32x4 multiply_pairs(I16x8 a, I16x8 b) {
#if defined(__SSE2__)
  return bits_as<I32x4>(_mm_madd_epi16((__m128i)a, (__m128i)b));
#elif defined(__ARM_NEON)
  return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
  const I32x4 wide_a = bits_as<I32x4>(a), wide_b = bits_as<I32x4>(b);
  return (wide_a << 16 >> 16) * (wide_b << 16 >> 16) + (wide_a >> 16) * (wide_b >> 16);
#endif
}

// Sums of neighbours: of a's, then of b's.
TOKENMILL_OP I32x4 add_neighbours(I32x4 a, I32x4 b) {
#if defined(__ARM_NEON)
  return vpaddq_s32(a, b);
#else
  return __builtin_shuffle(a, b, I32x4{0, 2, 4, 6}) + __builtin_shuffle(a, b, I32x4{1, 3, 5, 7});
#endif
}

// Pairs of bytes as 16 bits: the lower byte from a, the upper one from b.
TOKENMILL_OP I16x8 interleave_low(I8x16 a, I8x16 b) {
  return bits_as<I16x8>(__builtin_shuffle(
      a, b, I8x16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}));
}
TOKENMILL_OP I16x8 interleave_high(I8x16 a, I8x16 b) {
  return bits_as<I16x8>(__builtin_shuffle(
      a, b, I8x16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}));
}

// Bytes to 16 bits, with their sign.
TOKENMILL_OP I16x8 extend_low(I8x16 x) {
#if defined(__ARM_NEON)
  return vmovl_s8(vget_low_s8(x));
#else
  return interleave_low(I8x16{}, x) >> 8;
#endif
}
TOKENMILL_OP I16x8 extend_high(I8x16 x) {
#if defined(__ARM_NEON)
  return vmovl_high_s8(x);
#else
  return interleave_high(I8x16{}, x) >> 8;
#endif
}

#undef TOKENMILL_OP

}  // namespace
}  // namespace tokenmill
