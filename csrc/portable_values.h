// AVX-512's registers as four vectors of 128 bits each: their types, and what is done lane by lane.
// The rest of portable_registers.h is in that header.
#pragma once

#include "quad_vectors.h"

#if !defined(__x86_64__)
using __mmask8 = std::uint8_t;
using __mmask16 = std::uint16_t;

enum {
  _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_GT_OQ, _CMP_GE_OQ, _CMP_NEQ_UQ, _CMP_NLT_UQ, _CMP_UNORD_Q,
  _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_TO_POS_INF = 2, _MM_FROUND_NO_EXC = 8
};
#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _mm_prefetch(address, hint) __builtin_prefetch(address, 0, hint)
#endif

namespace tokenmill {
namespace {

struct HalfFloats {
  F32x4 low, high;
};
struct HalfIntegers {
  I32x4 low, high;
};
struct Floats {
  F32x4 a, b, c, d;
};
struct Integers {
  I32x4 a, b, c, d;
};
struct Doubles {
  F64x2 a, b, c, d;
};

#define TOKENMILL_OP static TOKENMILL_INLINE

// ---- All four alike ----------------------------------------------------------------------------

#define TOKENMILL_UNARY(Result, name, Type, op) \
  TOKENMILL_OP Result wide_##name(const Type& x) { return {op(x.a), op(x.b), op(x.c), op(x.d)}; }
#define TOKENMILL_BINARY(Type, name, op)                                        \
  TOKENMILL_OP Type wide_##name(const Type& x, const Type& y) {                 \
    return {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)};            \
  }
#define TOKENMILL_TERNARY(name, op)                                                     \
  TOKENMILL_OP Floats wide_##name(const Floats& x, const Floats& y, const Floats& z) {  \
    return {op(x.a, y.a, z.a), op(x.b, y.b, z.b), op(x.c, y.c, z.c), op(x.d, y.d, z.d)}; \
  }

template <class V>
TOKENMILL_OP V sum_of_two(V a, V b) {
  return a + b;
}
TOKENMILL_OP F32x4 difference(F32x4 a, F32x4 b) { return a - b; }
TOKENMILL_OP F32x4 product(F32x4 a, F32x4 b) { return a * b; }
TOKENMILL_OP F32x4 quotient(F32x4 a, F32x4 b) { return a / b; }
TOKENMILL_OP I32x4 exclusive_or(I32x4 a, I32x4 b) { return a ^ b; }
TOKENMILL_OP F32x4 negated_multiply_add(F32x4 a, F32x4 b, F32x4 c) {
  return multiply_add(-a, b, c);
}
// Exact up to its one rounding: it is used for what a product has lost.
TOKENMILL_OP F32x4 multiply_subtract(F32x4 a, F32x4 b, F32x4 c) {
#if defined(__ARM_NEON) || defined(__FP_FAST_FMAF)
  return multiply_add(a, b, -c);
#else
  return narrow(doubles_low(a) * doubles_low(b) - doubles_low(c),
                doubles_high(a) * doubles_high(b) - doubles_high(c));
#endif
}
TOKENMILL_OP I32x4 add_longs(I32x4 a, I32x4 b) {
  return bits_as<I32x4>(bits_as<U64x2>(a) + bits_as<U64x2>(b));
}
TOKENMILL_OP I32x4 multiply_longs(I32x4 a, I32x4 b) {
  return bits_as<I32x4>(bits_as<U64x2>(a) * bits_as<U64x2>(b));
}
TOKENMILL_OP I32x4 largest_word(I32x4 a, I32x4 b) {
  return bits_as<I32x4>(larger(bits_as<U32x4>(a), bits_as<U32x4>(b)));
}
// Counts from 64 on, as unsigned numbers, give 0.
TOKENMILL_OP I32x4 shift_longs(I32x4 x, I32x4 counts) {
  U64x2 values = bits_as<U64x2>(x);
  const U64x2 by = bits_as<U64x2>(counts);
  for (int i = 0; i < 2; ++i) values[i] = by[i] < 64 ? values[i] << by[i] : 0;
  return bits_as<I32x4>(values);
}

TOKENMILL_BINARY(Floats, add_ps, sum_of_two)
TOKENMILL_BINARY(Floats, sub_ps, difference)
TOKENMILL_BINARY(Floats, mul_ps, product)
TOKENMILL_BINARY(Floats, div_ps, quotient)
TOKENMILL_BINARY(Floats, max_ps, larger)
TOKENMILL_BINARY(Floats, min_ps, smaller)
TOKENMILL_BINARY(Floats, scalef_ps, scale_by_power)
TOKENMILL_TERNARY(fmadd_ps, multiply_add)
TOKENMILL_TERNARY(fmsub_ps, multiply_subtract)
TOKENMILL_TERNARY(fnmadd_ps, negated_multiply_add)
TOKENMILL_BINARY(Integers, xor_si512, exclusive_or)
TOKENMILL_BINARY(Integers, add_epi64, add_longs)
TOKENMILL_BINARY(Integers, max_epu32, largest_word)
TOKENMILL_BINARY(Integers, mullo_epi64, multiply_longs)
TOKENMILL_BINARY(Integers, sllv_epi64, shift_longs)
TOKENMILL_BINARY(Doubles, add_pd, sum_of_two)
TOKENMILL_UNARY(Integers, castps_si512, Floats, bits_as<I32x4>)
TOKENMILL_UNARY(Floats, castsi512_ps, Integers, bits_as<F32x4>)
TOKENMILL_UNARY(Integers, cvtps_epi32, Floats, to_integers)
TOKENMILL_UNARY(Floats, cvtepi32_ps, Integers, to_floats)
TOKENMILL_UNARY(Floats, abs_ps, Floats, magnitude)

#undef TOKENMILL_UNARY
#undef TOKENMILL_BINARY
#undef TOKENMILL_TERNARY

template <int Mode>
TOKENMILL_OP Floats round_floats(const Floats& x) {
  if constexpr ((Mode & _MM_FROUND_TO_POS_INF) != 0)
    return {round_up_whole(x.a), round_up_whole(x.b), round_up_whole(x.c), round_up_whole(x.d)};
  return {round_nearest(x.a), round_nearest(x.b), round_nearest(x.c), round_nearest(x.d)};
}
TOKENMILL_OP Integers wide_slli_epi32(const Integers& x, int count) {
  return {x.a << count, x.b << count, x.c << count, x.d << count};
}
TOKENMILL_OP Integers wide_srli_epi64(const Integers& x, int count) {
  const auto shifted = [count](I32x4 part) { return bits_as<I32x4>(bits_as<U64x2>(part) >> count); };
  return {shifted(x.a), shifted(x.b), shifted(x.c), shifted(x.d)};
}

// ---- Constants ---------------------------------------------------------------------------------

TOKENMILL_OP Floats wide_set1_ps(float x) { return {splat(x), splat(x), splat(x), splat(x)}; }
TOKENMILL_OP Floats wide_setzero_ps() { return Floats{}; }
TOKENMILL_OP Doubles wide_setzero_pd() { return Doubles{}; }
TOKENMILL_OP Integers wide_setzero_si512() { return Integers{}; }
TOKENMILL_OP Integers wide_set1_epi32(int x) { return {splat(x), splat(x), splat(x), splat(x)}; }
TOKENMILL_OP Integers wide_set1_epi64(std::uint64_t x) {
  const I32x4 all = bits_as<I32x4>(U64x2{x, x});
  return {all, all, all, all};
}
TOKENMILL_OP Integers wide_setr_epi64(std::int64_t a, std::int64_t b, std::int64_t c,
                                      std::int64_t d, std::int64_t e, std::int64_t f,
                                      std::int64_t g, std::int64_t h) {
  return {bits_as<I32x4>(I64x2{a, b}), bits_as<I32x4>(I64x2{c, d}), bits_as<I32x4>(I64x2{e, f}),
          bits_as<I32x4>(I64x2{g, h})};
}
TOKENMILL_OP Integers wide_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                      int j, int k, int l, int m, int n, int o, int p) {
  return {I32x4{a, b, c, d}, I32x4{e, f, g, h}, I32x4{i, j, k, l}, I32x4{m, n, o, p}};
}
TOKENMILL_OP HalfIntegers half_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
  return {I32x4{a, b, c, d}, I32x4{e, f, g, h}};
}
TOKENMILL_OP HalfIntegers half_set1_epi32(int x) { return {splat(x), splat(x)}; }

#undef TOKENMILL_OP

}  // namespace
}  // namespace tokenmill
