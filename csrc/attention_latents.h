// Values that are parts of keys: from the order of K to that of V. For files compiled with AVX2 or
// more.
//
// Of 16 tokens and 16 values, both orders hold 8 rows (16 for float32) of 16 words:
//
//   K    row: two values; word: their pair of one token          a b | c d      tokens along the row
//   V    row: two tokens; word: their pair of one value          a c | b d      values along the row
//
// So two words of K, with two values of two tokens, become two words of V by a swap in the middle,
// and all such pairs of words are transposed. float32 has single values in its words.
#pragma once

#include "attention_kernels.h"

namespace tokenmill {
namespace {

// 8 rows of 8 words of 32 bits.
struct Words8 {
  __m256i rows[8];

  static Words8 load(const std::uint8_t* data, std::int64_t stride) {
    Words8 words;
    for (int i = 0; i < 8; ++i)
      words.rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i * stride));
    return words;
  }

  void store_transposed(std::uint8_t* data, std::int64_t stride) const {
    __m256i pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
      fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
      fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
      fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      put(data + i * stride, _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20));
      put(data + (i + 4) * stride, _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31));
    }
  }

  static void put(std::uint8_t* data, __m256i row) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), row);
  }
};

// a b c d -> a c b d, of 16 bits each.
inline __m256i swap_middle_16(__m256i x) {
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xd8), 0xd8);
}

// a b c d -> a c b d, of 8 bits each.
inline __m256i swap_middle_8(__m256i x) {
  return _mm256_shuffle_epi8(
      x, _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 0, 2, 1, 3, 4, 6, 5,
                          7, 8, 10, 9, 11, 12, 14, 13, 15));
}

// 4 rows of 4 pairs of bf16 words.
inline void reorder_bf16(const std::uint8_t* keys, std::uint8_t* values) {
  __m256i rows[4];
  for (int i = 0; i < 4; ++i)
    rows[i] = swap_middle_16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i * 64)));
  for (int i = 0; i < 2; ++i) {  // even pairs, then odd ones
    const __m256i upper = i == 0 ? _mm256_unpacklo_epi64(rows[0], rows[1])
                                 : _mm256_unpackhi_epi64(rows[0], rows[1]);
    const __m256i lower = i == 0 ? _mm256_unpacklo_epi64(rows[2], rows[3])
                                 : _mm256_unpackhi_epi64(rows[2], rows[3]);
    Words8::put(values + i * 64, _mm256_permute2x128_si256(upper, lower, 0x20));
    Words8::put(values + (i + 2) * 64, _mm256_permute2x128_si256(upper, lower, 0x31));
  }
}

// A run: 16 values, from `begin` on, of the 16 tokens of a group of K, to half a run of V.
inline void reorder_run(KvFormat format, const std::uint8_t* group, int begin,
                        std::uint8_t* values) {
  switch (format) {
    case KvFormat::bf16:
      for (int row = 0; row < 8; row += 4)
        for (int column = 0; column < 8; column += 4)
          reorder_bf16(group + (begin / 2 + row) * 64 + column * 8,
                       values + column * 64 + row * 8);
      break;
    case KvFormat::int8: {
      Words8 words = Words8::load(group + begin / 2 * 32, 32);
      for (__m256i& row : words.rows) row = swap_middle_8(row);
      words.store_transposed(values, 32);
      break;
    }
    case KvFormat::float32:
      for (int row = 0; row < 16; row += 8)
        for (int column = 0; column < 16; column += 8)
          Words8::load(group + (begin + row) * 64 + column * 4, 64)
              .store_transposed(values + column * 64 + row * 4, 64);
      break;
  }
}

// Values [begin, begin + count) of the keys of a unit, in the order of a unit of V. Both are
// multiples of 16. Scales of int8 stay where they are.
inline void keys_to_values(KvFormat format, const std::uint8_t* group, std::int64_t group_bytes,
                           int begin, int count, std::uint8_t* values) {
  const int half = format == KvFormat::bf16 ? 512 : format == KvFormat::int8 ? 256 : 1024;
  for (int i = 0; i < 2; ++i)
    for (int run = 0; run < count / 16; ++run)
      reorder_run(format, group + i * group_bytes, begin + run * 16,
                  values + (2 * run + i) * half);
}

}  // namespace
}  // namespace tokenmill
