// Products of int8 caches with dot products of bytes: four values of a row times four of each of 16
// columns. For files compiled with NEON's dot products, behind portable_registers.h.
//
// A code of a row has 16 bits and counts 256 of its upper byte and one of its lower, both with a
// sign; so no code is above 32639. Each has a sum of its own, and both sums are exact. In memory a
// row has the lower bytes of four codes and then the upper ones, in the place of these codes.
#pragma once

#include "attention_vectors.h"

namespace tokenmill {
namespace {  // classes, too, are compiled for each instruction set by itself

struct CodeQuads {
  using Value = std::int16_t;
  using Word = std::int64_t;
  struct Sum {
    Integers lower, upper;
  };
  static constexpr int kColumnBytes = 64;  // two pairs of each column
  static constexpr bool kIsCodes = true;
  static constexpr int kMostRows = 2;  // each has sums of eight registers
  static constexpr float kMostCode = 32639.0f;

  static Sum zero() { return Sum{Integers{}, Integers{}}; }

  // Pairs of 16 columns, and behind them the next pair of each.
  static Integers load(const std::uint8_t* columns) {
    const auto at = [columns](int i) { return vreinterpretq_s16_u8(vld1q_u8(columns + 16 * i)); };
    const int16x8_t low = at(0), high = at(1), next_low = at(2), next_high = at(3);
    return {(I32x4)vzip1q_s16(low, next_low), (I32x4)vzip2q_s16(low, next_low),
            (I32x4)vzip1q_s16(high, next_high), (I32x4)vzip2q_s16(high, next_high)};
  }
  // What follows the last key is multiplied with zeros.
  static Integers load_first(const std::uint8_t* columns) { return load(columns); }

  static TOKENMILL_INLINE Sum add(const Sum& sum, const Integers& columns, std::int64_t row) {
    const int8x8_t codes = vcreate_s8(static_cast<std::uint64_t>(row));
    return {dots<0>(sum.lower, columns, codes), dots<1>(sum.upper, columns, codes)};
  }

  static Floats finish(const Sum& sum, const Floats& scale) {
    const Integers& low = sum.lower;
    const Integers& high = sum.upper;
    const Integers total = {(high.a << 8) + low.a, (high.b << 8) + low.b, (high.c << 8) + low.c,
                            (high.d << 8) + low.d};
    return wide_mul_ps(wide_cvtepi32_ps(total), scale);
  }

  static void store_codes(std::int16_t* codes, const Floats& values) {
    const Integers whole = wide_cvtps_epi32(values);
    store_four(codes, whole.a);
    store_four(codes + 4, whole.b);
    store_four(codes + 8, whole.c);
    store_four(codes + 12, whole.d);
  }

 private:
  template <int Half>
  static TOKENMILL_INLINE Integers dots(const Integers& sum, const Integers& x, int8x8_t codes) {
    const auto added = [codes](I32x4 part, I32x4 four) TOKENMILL_INLINE_LAMBDA {
      return (I32x4)vdotq_lane_s32((int32x4_t)part, (int8x16_t)four, codes, Half);
    };
    return {added(sum.a, x.a), added(sum.b, x.b), added(sum.c, x.c), added(sum.d, x.d)};
  }

  static void store_four(std::int16_t* codes, I32x4 whole) {
    const auto lower = bits_as<U8x16>(whole), rounded = bits_as<U8x16>(whole + splat(128));
    constexpr U8x16 kBytes = {0, 4, 8, 12, 17, 21, 25, 29, 0, 4, 8, 12, 17, 21, 25, 29};
    const auto bytes = bits_as<U64x2>(U8x16(__builtin_shuffle(lower, rounded, kBytes)));
    const std::uint64_t word = bytes[0];
    std::memcpy(codes, &word, sizeof word);
  }
};

}  // namespace
}  // namespace tokenmill
