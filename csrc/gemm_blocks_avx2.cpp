// Block products with AVX2: up to four rows times half a panel, or times a panel where there are
// few rows.
//
// The multiply instruction takes unsigned times signed bytes and adds neighbours in 16 bits, which
// must not overflow. Unsigned 4-bit codes are that: eight quads of them fit 16 bits,
// 8 * 2 * 15 * 127 = 30480. Signed codes become their magnitudes, and their signs go to x: two
// products are at most 2 * 128 * 127 = 32512, so these are widened to 32 bits quad by quad. All
// sums are exact, and what is done with them is AVX-512's arithmetic: the bits are the same.
#include "common.h"
#include "gemm_block_formats.h"
#include "gemm_store_avx2.h"

namespace tokenmill {
namespace {

constexpr int kMostRows = 4;  // divides QuantizedGroup::kRows, so that they lie in one block
constexpr int kFewRows = 2;
constexpr std::int64_t kAhead = 2048;  // bytes that the prefetch runs ahead

TOKENMILL_INLINE __m256i broadcast_quad(const std::int8_t* x) {
  std::int32_t values;
  std::memcpy(&values, x, 4);
  return _mm256_set1_epi32(values);
}

// Adds a quad of eight columns for all rows; sums are 16 bits for unsigned codes, else 32.
template <Kind K, int Rows>
TOKENMILL_INLINE void add_quad(__m256i codes, const std::int8_t* x, __m256i (&sums)[Rows]) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i magnitudes = K == Kind::unsigned4 ? codes : _mm256_abs_epi8(codes);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const __m256i values = broadcast_quad(x + r * kStep);
    if constexpr (K == Kind::unsigned4) {
      sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(codes, values));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(values, codes));
      sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
    }
  }
}

// Exact sums of a group for eight columns, those of register `part % 2` of their half.
template <Kind K, int Rows>
TOKENMILL_INLINE void add_codes(const std::uint8_t* codes, __m256i table, const std::int8_t* x,
                                __m256i (&sums)[Rows]) {
  if constexpr (K == Kind::signed8) {
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad)
      add_quad<K, Rows>(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes + quad * 64)),
                        x + 4 * quad, sums);
  } else {
    const __m256i mask = _mm256_set1_epi8(0x0f);
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads / 2; ++quad) {
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + quad * 64));
      __m256i low = _mm256_and_si256(both, mask);
      __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      if constexpr (K == Kind::table4) {
        low = _mm256_shuffle_epi8(table, low);
        high = _mm256_shuffle_epi8(table, high);
      }
      add_quad<K, Rows>(low, x + 4 * quad, sums);
      add_quad<K, Rows>(high, x + 4 * quad + kStep / 2, sums);
    }
  }
  if constexpr (K == Kind::unsigned4) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r] = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
  }
}

TOKENMILL_INLINE __m256 eight_halves(const fp16* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

struct Columns {
  const std::uint8_t* codes;  // of the panel's group
  const fp16* scales;
  __m256i table;
  int zero;
};

// One group of rows first, first + 1, ... for the eight columns of `part`.
template <class F, int Rows>
TOKENMILL_INLINE void add_group(const QuantizedGroup& x, int first, const Columns& group, int part,
                                __m256 (&sums)[Rows]) {
  __m256i exact[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) exact[r] = _mm256_setzero_si256();
  add_codes<F::kKind, Rows>(group.codes + part / 2 * F::kHalfBytes + part % 2 * 32, group.table,
                            x.codes[first], exact);
  const __m256 scale = eight_halves(group.scales + part * kEight);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    __m256i sum = exact[r];
    if constexpr (F::kKind == Kind::unsigned4 && !F::kHasMinimum)
      sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(group.zero * x.sums[first + r]));
    const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[first + r]));
    sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, sums[r]);
  }
  if constexpr (F::kHasMinimum) {
    const __m256 minimum = eight_halves(group.scales + kPanel + part * kEight);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      sums[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.scaled_sums[first + r]), sums[r]);
  }
}

// Columns of `Parts` registers from `part` on.
template <class F, int Rows, int Parts>
void multiply_parts(const QuantizedRows& x, int row, Columns columns, int part,
                    const PanelOutputAvx2& out) {
  const QuantizedGroup* x_groups = x.block_of(row);
  const int first = row % QuantizedGroup::kRows;
  __m256 sums[Parts][Rows];
#pragma GCC unroll 4
  for (int p = 0; p < Parts; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[p][r] = _mm256_setzero_ps();
  for (int g = 0; g < x.num_groups; ++g, columns.codes += F::kGroupBytes) {
    columns.scales = reinterpret_cast<const fp16*>(columns.codes + 2 * F::kHalfBytes);
    for (std::size_t line = 0; line < F::kGroupBytes; line += 4 * kCacheLine / Parts)
      _mm_prefetch(reinterpret_cast<const char*>(columns.codes) + kAhead + line, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) {
      add_group<F, Rows>(x_groups[g], first, columns, part + p, sums[p]);
      // Nothing of x that these columns read may be kept for the next ones: it would take the
      // registers, and reading it again is cheaper than that.
      __asm__ volatile("" : : : "memory");
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) out.store(row + r, part + p, sums[p][r]);
}

template <class F, int Rows = kMostRows>
void multiply_tile(int num_rows, const QuantizedRows& x, int row, const Columns& columns,
                   const PanelOutputAvx2& out) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return multiply_tile<F, Rows - 1>(num_rows, x, row, columns, out);
  }
  if constexpr (Rows <= kFewRows) {
    multiply_parts<F, Rows, 4>(x, row, columns, 0, out);
  } else {
    multiply_parts<F, Rows, 2>(x, row, columns, 0, out);
    multiply_parts<F, Rows, 2>(x, row, columns, 2, out);
  }
}

template <class F>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const std::size_t panel_bytes = x.num_groups * F::kGroupBytes;
  Columns columns{nullptr, nullptr, _mm256_setzero_si256(), weights.format.zero};
  if constexpr (F::kKind == Kind::table4)
    columns.table = _mm256_broadcastsi128_si256(_mm_loadu_si128(
        reinterpret_cast<const __m128i*>(code_table(weights.format.codes))));
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutputAvx2 target(out, weights.n, p);
    columns.codes = weights.data + p * panel_bytes;
    for (int row = rows.begin; row < rows.end; row += kMostRows)
      multiply_tile<F>(min_of(rows.end - row, kMostRows), x, row, columns, target);
  }
}

}  // namespace

void gemm_blocks_avx2(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                      const OutputRows& out) {
  with_format(weights.format, [&](auto format) {
    multiply_panels<decltype(format)>(x, rows, weights, panels, out);
  });
}

}  // namespace tokenmill
