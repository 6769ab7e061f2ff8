// Attention products with AVX-512: up to 4 rows times 4 vectors of 16 columns. A word of a row
// (two bf16 values, two int16 codes or a float32) is multiplied with 16 words, and the products are
// added one after another. For files compiled with AVX-512 only.
#pragma once

#include "attention_rows.h"
#include "elementwise_math.h"
#include "repeat.h"

namespace tokenmill {
namespace {  // classes, too, are compiled for each instruction set by itself

#if defined(TOKENMILL_WIDE_REGISTERS)
constexpr int kMostColumns = 1;
constexpr int kTileRows = TOKENMILL_WIDE_REGISTERS < 8 ? 2 : 4;
static TOKENMILL_INLINE void keep_in_register(__m512i&) {}
#else
constexpr int kMostColumns = 4;
constexpr int kTileRows = 4;
// Compilers would load it again for each row.
static TOKENMILL_INLINE void keep_in_register(__m512i& word) { __asm__("" : "+v"(word)); }
#endif

struct Bf16Words {
  using Value = bf16;
  using Word = std::int32_t;  // of a row: what is multiplied with a vector of columns
  using Sum = __m512;
  static constexpr int kColumnBytes = 64;  // of 16 words in the cache
  static constexpr bool kIsCodes = false;
  static constexpr int kMostRows = kTileRows;
  static constexpr float kMostCode = 0.0f;
  static Sum zero() { return _mm512_setzero_ps(); }
  static __m512i load(const std::uint8_t* columns) { return _mm512_loadu_si512(columns); }
  // The first of the two values of each word; the other may be anything in memory.
  static __m512i load_first(const std::uint8_t* columns) {
    return _mm512_maskz_loadu_epi16(0x55555555u, columns);
  }
  static Sum add(Sum sum, __m512i columns, std::int32_t row) {
    return _mm512_dpbf16_ps(sum, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(row));
  }
  static __m512 finish(Sum sum, __m512) { return sum; }
};

struct FloatWords {
  using Value = float;
  using Word = std::int32_t;
  using Sum = __m512;
  static constexpr int kColumnBytes = 64;
  static constexpr bool kIsCodes = false;
  static constexpr int kMostRows = kTileRows;
  static constexpr float kMostCode = 0.0f;
  static Sum zero() { return _mm512_setzero_ps(); }
  static __m512i load(const std::uint8_t* columns) { return _mm512_loadu_si512(columns); }
  static __m512i load_first(const std::uint8_t* columns) { return load(columns); }
  static Sum add(Sum sum, __m512i columns, std::int32_t row) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(columns),
                           _mm512_castsi512_ps(_mm512_set1_epi32(row)), sum);
  }
  static __m512 finish(Sum sum, __m512) { return sum; }
};

// Rows of int16 codes; a sum of 512 products with int8 codes fits 32 bits.
struct CodeWords {
  using Value = std::int16_t;
  using Word = std::int32_t;
  using Sum = __m512i;
  static constexpr int kColumnBytes = 32;
  static constexpr bool kIsCodes = true;
  static constexpr int kMostRows = kTileRows;
  static constexpr float kMostCode = 32767.0f;
  static Sum zero() { return _mm512_setzero_si512(); }
  static __m512i load(const std::uint8_t* columns) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns)));
  }
  static __m512i load_first(const std::uint8_t* columns) {
    return _mm512_maskz_mov_epi16(0x55555555u, load(columns));
  }
  static Sum add(Sum sum, __m512i columns, std::int32_t row) {
    return _mm512_dpwssd_epi32(sum, columns, _mm512_set1_epi32(row));
  }
  static __m512 finish(Sum sum, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
  }
  // 16 codes of a row.
  static void store_codes(std::int16_t* codes, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(values)));
  }
};

// Asks for a line of memory that will be needed soon. Into the second level: the first one has room
// for fewer requests on the way.
static TOKENMILL_INLINE void fetch(const std::uint8_t* line) {
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
}

// Sums of up to 4 rows times 4 vectors of columns.
template <class Words, int Rows, int Columns>
struct Sums {
  typename Words::Sum values[Rows][Columns];

  TOKENMILL_INLINE void clear() {
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
      repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
        values[r.value][c.value] = Words::zero();
      });
    });
  }

  // Adds one word of each row times load(0), ..., load(Columns - 1).
  template <class Load>
  TOKENMILL_INLINE void add(const typename Words::Word* rows, std::int64_t row_stride,
                            const Load& load) {
    __m512i words[Columns];
    repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
      __m512i word = load(c.value);
      keep_in_register(word);
      words[c.value] = word;
    });
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
      const typename Words::Word word = rows[r.value * row_stride];
      repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
        values[r.value][c.value] = Words::add(values[r.value][c.value], words[c.value], word);
      });
    });
  }
};

// body(Number<rows>, first row) over all rows, as many at once as there are registers for.
template <int Most, class F>
static TOKENMILL_INLINE void in_tiles(int num_rows, const F& body) {
  int r = 0;
  for (; r + Most <= num_rows; r += Most) body(Number<Most>{}, r);
  if constexpr (Most > 2) {
    if (num_rows - r == 3) return body(Number<3>{}, r);
    if (num_rows - r == 2) return body(Number<2>{}, r);
  }
  if (num_rows - r == 1) body(Number<1>{}, r);
}

// Rows in words.
template <class Word>
struct WordRows {
  const Word* data;
  std::int64_t stride;
  int count;
};

// Products with units of K and V. Both consist of halves of 16 tokens, and these of head_size / 16
// runs of 16 tokens times 16 values. While one half is read, half of the unit in its place in
// `ahead` is fetched.
template <class Words>
class VectorProducts {
 public:
  using Rows = WordRows<typename Words::Word>;

  // `size` values of a head, and how far apart results of `weighted` are.
  VectorProducts(int size, int out_stride)
      : out_stride_(out_stride), num_runs_(size / 16), code_bytes_(num_runs_ * kRunBytes) {}

  // out[r][column] = q[r] . k[column], for int8 times the key's scale and row_scales[r]. Columns
  // that fill up the last 32 may be anything.
  void scores(const Rows& q, const float* row_scales, const Units& units,
              const AheadUnit* ahead, float* out, int out_stride) const {
    const int num_groups = ceil_div(units.num_keys, kKeyGroup);
    int g = 0;
    for (; g + kMostColumns <= num_groups; g += kMostColumns)
      score_groups<kMostColumns>(q, row_scales, units, ahead, g, kMostColumns, out + g * 16,
                                 out_stride);
    if constexpr (kMostColumns > 2)
      for (; g < num_groups; g += 2)
        score_groups<2>(q, row_scales, units, ahead, g, num_groups - g, out + g * 16, out_stride);
  }

  // out[r] = sum of p[r][token] v[token] over the keys of the units, for int8 times row_scales[r].
  void weighted(const Rows& p, const float* row_scales, const Units& units,
                const AheadUnit* ahead, float* out) const {
    int run = 0;
    if constexpr (kMostColumns > 1) {
      for (; run + 4 <= num_runs_; run += 4)
        weighted_runs<4>(p, row_scales, units, ahead, run, out);
      for (; run + 2 <= num_runs_; run += 2)
        weighted_runs<2>(p, row_scales, units, ahead, run, out);
    }
    for (; run < num_runs_; ++run) weighted_runs<1>(p, row_scales, units, ahead, run, out);
  }

 private:
  static constexpr bool kIsCodes = Words::kIsCodes;
  static constexpr int kPacked =  // values in a word
      sizeof(typename Words::Word) / sizeof(typename Words::Value);
  static constexpr int kRunWords = 16 / kPacked;
  static constexpr std::int64_t kRunBytes = kRunWords * Words::kColumnBytes;
  static constexpr int kLineWords = 64 / Words::kColumnBytes;
  static constexpr int kRunLines = kRunWords / kLineWords;

  std::int64_t group_bytes() const {  // of K
    return code_bytes_ + (kIsCodes ? kKeyGroup * sizeof(float) : 0);
  }
  // Half of a unit in bytes. For K these are its groups; for V both have lines of all tokens.
  const std::uint8_t* half(const AheadUnit& unit, int index) const {
    if (unit.is_half) index = 0;
    return unit.data + index * (unit.is_value ? code_bytes_ : group_bytes());
  }
  void fetch_scales(const AheadUnit& unit, int half) const {
    if (kIsCodes)
      fetch(unit.data + (unit.is_value ? 2 * code_bytes_ + half * kCacheLine
                                       : half * group_bytes() + code_bytes_));
  }

  template <int Columns>
  void score_groups(const Rows& q, const float* row_scales, const Units& units,
                    const AheadUnit* ahead, int group, int count, float* out,
                    int out_stride) const {
    const std::uint8_t* columns[Columns];
    const std::uint8_t* next[Columns];
    for (int c = 0; c < Columns; ++c) {
      const int g = group + (c < count ? c : 0);
      columns[c] = units.keys[g / 2] + g % 2 * group_bytes();
      next[c] = half(ahead[g / 2], g % 2);
      fetch_scales(ahead[g / 2], g % 2);
    }
    in_tiles<Words::kMostRows>(q.count, [&](auto rows, int r) {
      constexpr int kRows = decltype(rows)::value;
      Sums<Words, kRows, Columns> sums;
      sums.clear();
      const typename Words::Word* words = q.data + r * q.stride;
      std::int64_t at = 0;
      while (at < code_bytes_) {
        repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA { fetch(next[c.value] + at); });
        repeat<kLineWords>([&](auto) TOKENMILL_INLINE_LAMBDA {
          sums.add(words++, q.stride, [&](int c) TOKENMILL_INLINE_LAMBDA {
            return Words::load(columns[c] + at);
          });
          at += Words::kColumnBytes;
        });
      }
      repeat<kRows>([&](auto i) TOKENMILL_INLINE_LAMBDA {
        repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
          __m512 scale = _mm512_setzero_ps();
          if constexpr (kIsCodes)
            scale = _mm512_mul_ps(_mm512_loadu_ps(columns[c.value] + at),
                                  _mm512_set1_ps(row_scales[r + i.value]));
          _mm512_storeu_ps(out + std::int64_t{r + i.value} * out_stride + c.value * 16,
                           Words::finish(sums.values[i.value][c.value], scale));
        });
      });
    });
  }

  template <int Columns>
  void weighted_runs(const Rows& p, const float* row_scales, const Units& units,
                     const AheadUnit* ahead, int run, float* out) const {
    constexpr std::int64_t kStride = 2 * kRunBytes;
    in_tiles<Words::kMostRows>(p.count, [&](auto rows, int r) {
      constexpr int kRows = decltype(rows)::value;
      Sums<Words, kRows, Columns> sums;
      sums.clear();
      const typename Words::Word* words = p.data + r * p.stride;
      for (int i = 0; i * 16 < units.num_keys; ++i) {
        const std::uint8_t* columns =
            units.values(i / 2) + i % 2 * kRunBytes + run * kStride;
        const std::uint8_t* next = half(ahead[i / 2], i % 2) + run * kRunBytes;
        if (run == 0) fetch_scales(ahead[i / 2], i % 2);
        const int left = units.num_keys - i * 16;
        if (left >= 16) {
          for (int line = 0; line < kRunLines; ++line) {
            repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
              fetch(next + c.value * kRunBytes);
            });
            next += 64;
            repeat<kLineWords>([&](auto) TOKENMILL_INLINE_LAMBDA {
              sums.add(words++, p.stride, [&](int c) TOKENMILL_INLINE_LAMBDA {
                return Words::load(columns + c * kStride);
              });
              columns += Words::kColumnBytes;
            });
          }
          continue;
        }
        for (int line = 0; line < kRunLines; ++line)
          for (int c = 0; c < Columns; ++c) fetch(next + c * kRunBytes + line * 64);
        for (int token = 0; token < left; token += kPacked) {
          const bool is_whole = token + kPacked <= left;
          sums.add(words++, p.stride, [&](int c) TOKENMILL_INLINE_LAMBDA {
            const std::uint8_t* at = columns + c * kStride;
            return is_whole ? Words::load(at) : Words::load_first(at);
          });
          columns += Words::kColumnBytes;
        }
      }
      repeat<kRows>([&](auto i) TOKENMILL_INLINE_LAMBDA {
        const __m512 scale = _mm512_set1_ps(kIsCodes ? row_scales[r + i.value] : 1.0f);
        repeat<Columns>([&](auto c) TOKENMILL_INLINE_LAMBDA {
          _mm512_storeu_ps(out + std::int64_t{r + i.value} * out_stride_ + (run + c.value) * 16,
                           Words::finish(sums.values[i.value][c.value], scale));
        });
      });
    });
  }

  const int out_stride_, num_runs_;
  const std::int64_t code_bytes_;  // of 16 tokens
};

}  // namespace
}  // namespace tokenmill
