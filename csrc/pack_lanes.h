// Packing with vector registers: a lane is a column of the panel, which is a row of the weight, so
// that nothing is summed or compared across lanes and codes come out in the order of the layout.
//
// Included by the files of instruction sets, which define kWidth, the lanes of a register, before.
// Quantised groups have the bits of quantize_group_8bit and quantize_group_4bit: every sum has
// their order.
#pragma once

#include "block_formats.h"
#include "common.h"
#include "gemm_kernels.h"
#include "pack_steps.h"

namespace tokenmill {
namespace {

using Floats = float __attribute__((vector_size(4 * kWidth), may_alias));
using Ints = std::int32_t __attribute__((vector_size(4 * kWidth), may_alias));

constexpr int kBlock = kWidth < 8 ? kWidth : 8;  // rows and columns transposed at a time
constexpr int kPairs = kStep / 2;
constexpr float kMostHalf = 65504.0f;

TOKENMILL_INLINE Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }
TOKENMILL_INLINE Ints as_ints(Floats values) { return reinterpret_cast<Ints>(values); }

// kBlock numbers of 4 bytes from byte `begin` of as many rows, to rows of `out`, `stride` numbers
// apart.
#if defined(__AVX2__)
TOKENMILL_INLINE void transpose_block(const void* const* rows, int begin, std::int32_t* out,
                                      int stride) {
  __m256i in[kBlock], mixed[kBlock];
  for (int i = 0; i < kBlock; ++i)
    in[i] = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const char*>(rows[i]) + begin));
  for (int i = 0; i < kBlock; i += 2) {
    mixed[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
    mixed[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < kBlock; i += 4)
    for (int j = 0; j < 2; ++j) {
      in[i + 2 * j] = _mm256_unpacklo_epi64(mixed[i + j], mixed[i + 2 + j]);
      in[i + 2 * j + 1] = _mm256_unpackhi_epi64(mixed[i + j], mixed[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {
    auto* low = reinterpret_cast<__m256i*>(out + i * stride);
    auto* high = reinterpret_cast<__m256i*>(out + (i + 4) * stride);
    _mm256_storeu_si256(low, _mm256_permute2x128_si256(in[i], in[i + 4], 0x20));
    _mm256_storeu_si256(high, _mm256_permute2x128_si256(in[i], in[i + 4], 0x31));
  }
}
#else
TOKENMILL_INLINE void transpose_block(const void* const* rows, int begin, std::int32_t* out,
                                      int stride) {
  Ints in[kBlock];
  for (int i = 0; i < kBlock; ++i)
    std::memcpy(&in[i], static_cast<const char*>(rows[i]) + begin, sizeof in[i]);
  constexpr Ints kEven = {0, 4, 1, 5}, kOdd = {2, 6, 3, 7}, kLow = {0, 1, 4, 5}, kHigh = {2, 3, 6, 7};
  const Ints a = __builtin_shuffle(in[0], in[1], kEven), b = __builtin_shuffle(in[0], in[1], kOdd);
  const Ints c = __builtin_shuffle(in[2], in[3], kEven), d = __builtin_shuffle(in[2], in[3], kOdd);
  const Ints columns[] = {__builtin_shuffle(a, c, kLow), __builtin_shuffle(a, c, kHigh),
                          __builtin_shuffle(b, d, kLow), __builtin_shuffle(b, d, kHigh)};
  for (int i = 0; i < kBlock; ++i) std::memcpy(out + i * stride, &columns[i], sizeof columns[i]);
}
#endif

// kBlock values of half precision to floats, and back: the instruction keeps bits of a NaN.
#if defined(__AVX2__)
TOKENMILL_INLINE void widen_halves(const fp16* halves, float* values) {
  _mm256_store_ps(values,
                  _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))));
}
TOKENMILL_INLINE void round_to_halves(const float* values, fp16* halves) {
  const __m256 part = _mm256_load_ps(values);
  if (_mm256_movemask_ps(_mm256_cmp_ps(part, part, _CMP_UNORD_Q)) == 0) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves),
                     _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    for (int i = 0; i < kBlock; ++i) halves[i] = float_to_fp16(values[i]);
  }
}
#else
TOKENMILL_INLINE void widen_halves(const fp16* halves, float* values) {
  for (int i = 0; i < kBlock; ++i) values[i] = fp16_to_float(halves[i]);
}
TOKENMILL_INLINE void round_to_halves(const float* values, fp16* halves) {
  for (int i = 0; i < kBlock; ++i) halves[i] = float_to_fp16(values[i]);
}
#endif

// 32 values of each of kWidth rows, value after value.
struct Lanes {
  alignas(64) std::int32_t bits[kStep][kWidth];

  TOKENMILL_INLINE Floats value(int j) const {
    return *reinterpret_cast<const Floats*>(bits[j]);
  }

  void load_float32(const void* const* rows) {
    for (int column = 0; column < kWidth; column += kBlock)
      for (int j = 0; j < kStep; j += kBlock)
        transpose_block(rows + column, 4 * j, bits[j] + column, kWidth);
  }

  void load_bf16(const void* const* rows) {
    alignas(64) std::int32_t pairs[kPairs][kWidth];
    for (int column = 0; column < kWidth; column += kBlock)
      for (int pair = 0; pair < kPairs; pair += kBlock)
        transpose_block(rows + column, 4 * pair, pairs[pair] + column, kWidth);
    for (int pair = 0; pair < kPairs; ++pair) {
      const Ints both = *reinterpret_cast<const Ints*>(pairs[pair]);
      *reinterpret_cast<Ints*>(bits[2 * pair]) = both << 16;
      *reinterpret_cast<Ints*>(bits[2 * pair + 1]) = both & -65536;
    }
  }

  void load_fp16(const void* const* rows) {
    alignas(64) float wide[kWidth][kStep];
    const void* wide_rows[kWidth];
    for (int column = 0; column < kWidth; ++column) {
      for (int j = 0; j < kStep; j += kBlock)
        widen_halves(static_cast<const fp16*>(rows[column]) + j, wide[column] + j);
      wide_rows[column] = wide[column];
    }
    load_float32(wide_rows);
  }

  void load(SourceType type, const void* const* rows) {
    switch (type) {
      case SourceType::bf16: return load_bf16(rows);
      case SourceType::fp16: return load_fp16(rows);
      case SourceType::float32: return load_float32(rows);
    }
  }
};

// Of eight partial results, in the order in which quantize_group_4bit adds.
TOKENMILL_INLINE Floats folded(Floats (&sums)[8]) {
  for (int width = 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

struct Extremes {
  Floats least, most;
};

TOKENMILL_INLINE Extremes extremes(const Lanes& lanes) {
  Floats least[8], most[8];
  for (int i = 0; i < 8; ++i) least[i] = most[i] = lanes.value(i);
  for (int j = 8; j < kStep; j += 8)
    for (int i = 0; i < 8; ++i) {
      const Floats value = lanes.value(j + i);
      least[i] = value < least[i] ? value : least[i];
      most[i] = value > most[i] ? value : most[i];
    }
  for (int i = 1; i < 8; ++i) {
    least[0] = least[i] < least[0] ? least[i] : least[0];
    most[0] = most[i] > most[0] ? most[i] : most[0];
  }
  return {least[0], most[0]};
}

// Rounds to fp16, at most the largest; gives what the fp16 stand for.
TOKENMILL_INLINE Floats to_scales(Floats values, fp16* halves) {
  const Floats most = Floats{} + kMostHalf;
  values = values > most ? most : values < -most ? -most : values;
  alignas(64) float in[kWidth], out[kWidth];
  *reinterpret_cast<Floats*>(in) = values;
  for (int i = 0; i < kWidth; i += kBlock) {
    round_to_halves(in + i, halves + i);
    widen_halves(halves + i, out + i);
  }
  return *reinterpret_cast<const Floats*>(out);
}

TOKENMILL_INLINE Floats inverse_of(Floats scale) {
  return scale == 0.0f ? Floats{} : 1.0f / scale;
}

// As round_within: bounds are below 2^22, and a NaN is the lower one.
TOKENMILL_INLINE Ints rounded(Floats value, Floats least, Floats most) {
  value = value > least ? value : least;
  value = value < most ? value : most;
  return as_ints(value + 12582912.0f) - 0x4b400000;
}

// Places in a group of the layout for the lanes from `column` on.
struct Target {
  std::uint8_t* group;
  BlockFormat format;
  int column;

  TOKENMILL_INLINE void store_quad(int quad, int quads, Ints bytes) const {
    std::uint8_t* to = group + ((column / kHalf * quads + quad) * kHalf + column % kHalf) * 4;
    std::memcpy(to, &bytes, sizeof bytes);
  }
  fp16* scales() const { return reinterpret_cast<fp16*>(group + format.code_bytes()) + column; }
  fp16* minimums() const { return scales() + kPanel; }
};

void quantize_8bit(const Lanes& lanes, const Target& target) {
  const Extremes range = extremes(lanes);
  const Floats most = range.most > -range.least ? range.most : -range.least;
  const Floats inverse = inverse_of(to_scales(most / 127.0f, target.scales()));
  const Floats bound = Floats{} + 127.0f;
  for (int quad = 0; quad < kQuads; ++quad) {
    Ints bytes{};
    for (int i = 0; i < 4; ++i)
      bytes |= (rounded(lanes.value(4 * quad + i) * inverse, -bound, bound) & 255) << 8 * i;
    target.store_quad(quad, kQuads, bytes);
  }
}

void quantize_4bit(const Lanes& lanes, const Target& target) {
  constexpr int kFits = 2;
  const Extremes range = extremes(lanes);
  Floats values_sums[8] = {};
  for (int j = 0; j < kStep; ++j) values_sums[j % 8] += lanes.value(j);
  const Floats sum = folded(values_sums), zero{}, most = zero + 15.0f;
  Floats scale = (range.most - range.least) / 15.0f, minimum = range.least;
  alignas(64) Ints whole[kStep];
  for (int fit = 0;; ++fit) {
    scale = to_scales(scale, target.scales());
    minimum = to_scales(minimum, target.minimums());
    const Floats inverse = inverse_of(scale);
    Floats codes_sums[8] = {}, squares_sums[8] = {}, products_sums[8] = {};
    for (int j = 0; j < kStep; j += 8)
      for (int i = 0; i < 8; ++i) {
        const Floats value = lanes.value(j + i);
        whole[j + i] = rounded((value - minimum) * inverse, zero, most);
        const Floats code = __builtin_convertvector(whole[j + i], Floats);
        codes_sums[i] += code;
        squares_sums[i] += code * code;
        products_sums[i] += code * value;
      }
    if (fit == kFits) break;
    const Floats codes_sum = folded(codes_sums);
    const Floats spread = kStep * folded(squares_sums) - codes_sum * codes_sum;
    const Floats fitted = (kStep * folded(products_sums) - codes_sum * sum) / spread;
    // A lane without a better fit stays as it is: it finds the same codes again.
    const Ints is_better = (spread != 0.0f) & (fitted > 0.0f);
    scale = is_better ? fitted : scale;
    minimum = is_better ? (sum - fitted * codes_sum) / static_cast<float>(kStep) : minimum;
  }
  for (int quad = 0; quad < kQuads / 2; ++quad) {
    Ints bytes{};
    for (int i = 0; i < 4; ++i)
      bytes |= (whole[4 * quad + i] | whole[kStep / 2 + 4 * quad + i] << 4) << 8 * i;
    target.store_quad(quad, kQuads / 2, bytes);
  }
}

TOKENMILL_INLINE void quantize_columns(SourceType source, const void* const* rows, BlockType type,
                                       std::uint8_t* group) {
  Lanes lanes;
  for (int column = 0; column < kPanel; column += kWidth) {
    lanes.load(source, rows + column);
    const Target target{group, block_format(type), column};
    if (type == BlockType::q4_1)
      quantize_4bit(lanes, target);
    else
      quantize_8bit(lanes, target);
  }
}

// [2 halves][16 pairs][16 columns], pairs being numbers of 4 bytes.
TOKENMILL_INLINE void place_bf16(const void* const* rows, bf16* target) {
  auto* numbers = reinterpret_cast<std::int32_t*>(target);
  for (int column = 0; column < kPanel; column += kBlock)
    for (int pair = 0; pair < kPairs; pair += kBlock)
      transpose_block(rows + column, 4 * pair,
                      numbers + (column / kHalf * kPairs + pair) * kHalf + column % kHalf, kHalf);
}

}  // namespace
}  // namespace tokenmill
