// Block products with AVX-512: up to eight rows times a panel.
//
// A group of 32 values along K is multiplied half by half: eight rows of exact integers, scaled and
// added to the sums, then the other half's. So weights are read in the order of their addresses,
// which memory is fastest at, and sums and integers of eight rows fit the registers.
//
// The multiply instruction takes unsigned weights. 8-bit codes become unsigned by adding 128, and
// the integers start at what that adds; so do 4-bit codes whose zero is not 0. Codes of a table are
// looked up in a register, and 128 has been added to the table.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "isa.h"

namespace tokenmill {
namespace {

// Loops over rows are unrolled, as sums in an array stay in registers only then.

constexpr int kMostRows = 8;  // divides QuantizedGroup::kRows, so that they lie in one block

// Bytes that the prefetch runs ahead. Processors without AMX that we know (Zen 4) read a plain
// stream a fifth faster by themselves, unless the work on it holds them up.
std::int64_t prefetch_distance(int num_rows) {
  constexpr int kFewRows = 4;
  return num_rows <= kFewRows && detected_isa() != Isa::amx ? 0 : 4096;
}

// A format as the instructions see it. Zero is what unsigned codes exceed the values by.
template <int Bits_, int Zero_, bool HasMinimum_, Codes Codes_ = Codes::linear>
struct Format {
  static constexpr Codes kCodes = Codes_;
  static constexpr int kBits = Bits_, kZero = Zero_;
  static constexpr bool kHasMinimum = HasMinimum_;
  static constexpr int kHalfBytes = kHalf * kStep * kBits / 8;
  static constexpr std::size_t kGroupBytes = BlockFormat{kBits, 0, kHasMinimum}.group_bytes();
};

// Inline by force, as the compiler may hold a call that only prefetches to be without effect.
TOKENMILL_INLINE void prefetch(const void* data, std::int64_t ahead) {
  _mm_prefetch(static_cast<const char*>(data) + ahead, _MM_HINT_T0);
}

__m512 half_scales(const fp16* scales) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales)));
}

TOKENMILL_INLINE __m512i unsigned_table(Codes codes) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code_table(codes)));
  return _mm512_broadcast_i32x4(_mm_xor_si128(table, _mm_set1_epi8(static_cast<char>(0x80))));
}

// x is the rows' codes from the quad's first value on.
template <int Rows>
TOKENMILL_INLINE void add_quad(__m512i codes, const std::int8_t* x, __m512i (&integers)[Rows]) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    std::int32_t values;
    std::memcpy(&values, x + r * kStep, 4);
    integers[r] = _mm512_dpbusd_epi32(integers[r], codes, _mm512_set1_epi32(values));
  }
}

template <class F, int Rows>
TOKENMILL_INLINE void add_codes(const std::uint8_t* half_codes, const std::int8_t* x,
                                std::int64_t ahead, __m512i (&integers)[Rows]) {
  const __m512i* codes = reinterpret_cast<const __m512i*>(half_codes);
  if constexpr (F::kBits == 4) {
    const __m512i low_mask = _mm512_set1_epi8(0x0f);
    const __m512i table = unsigned_table(F::kCodes);
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads / 2; ++quad) {
      prefetch(codes + quad, ahead);
      const __m512i both = _mm512_load_si512(codes + quad);
      __m512i low = _mm512_and_si512(both, low_mask);
      __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
      if constexpr (F::kCodes != Codes::linear) {
        low = _mm512_shuffle_epi8(table, low);
        high = _mm512_shuffle_epi8(table, high);
      }
      add_quad<Rows>(low, x + 4 * quad, integers);
      add_quad<Rows>(high, x + 4 * quad + kStep / 2, integers);
    }
  } else {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      prefetch(codes + quad, ahead);
      const __m512i code = _mm512_xor_si512(_mm512_load_si512(codes + quad), offset);
      add_quad<Rows>(code, x + 4 * quad, integers);
    }
  }
}

template <class F, int Rows>
TOKENMILL_INLINE void add_half(const QuantizedGroup& x, int first, const std::uint8_t* codes,
                               const fp16* scales, std::int64_t ahead, __m512 (&sums)[Rows]) {
  __m512i integers[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) integers[r] = _mm512_set1_epi32(-F::kZero * x.sums[first + r]);
  add_codes<F, Rows>(codes, x.codes[first], ahead, integers);
  const __m512 scale = half_scales(scales);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[first + r]));
    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[r]), both, sums[r]);
  }
  if constexpr (F::kHasMinimum) {
    const __m512 minimum = half_scales(scales + kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.scaled_sums[first + r]), sums[r]);
  }
}

template <class F, int Rows>
void multiply_rows(const QuantizedRows& x, int row, const std::uint8_t* panel,
                   std::int64_t ahead, const PanelOutput& out) {
  const QuantizedGroup* x_groups = x.block_of(row);
  const int first = row % QuantizedGroup::kRows;
  __m512 low[Rows], high[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int g = 0; g < x.num_groups; ++g, panel += F::kGroupBytes) {
    const fp16* scales = reinterpret_cast<const fp16*>(panel + 2 * F::kHalfBytes);
    add_half<F, Rows>(x_groups[g], first, panel, scales, ahead, low);
    // Nothing of x that the first half read may be kept for the second: it would take the
    // registers, and reading it again is cheaper than that.
    __asm__ volatile("" : : : "memory");
    add_half<F, Rows>(x_groups[g], first, panel + F::kHalfBytes, scales + kHalf, ahead, high);
    prefetch(scales, ahead);
    if constexpr (F::kHasMinimum) prefetch(scales + kPanel, ahead);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    out.store(row + r, 0, low[r]);
    out.store(row + r, 1, high[r]);
  }
}

template <class F, int Rows = kMostRows>
void multiply_tile(int num_rows, const QuantizedRows& x, int row, const std::uint8_t* panel,
                   std::int64_t ahead, const PanelOutput& out) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return multiply_tile<F, Rows - 1>(num_rows, x, row, panel, ahead, out);
  }
  multiply_rows<F, Rows>(x, row, panel, ahead, out);
}

template <class F>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const std::size_t panel_bytes = x.num_groups * F::kGroupBytes;
  const std::int64_t ahead = prefetch_distance(rows.end - rows.begin);
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutput target(out, weights.n, p);
    for (int row = rows.begin; row < rows.end; row += kMostRows)
      multiply_tile<F>(min_of(rows.end - row, kMostRows), x, row, weights.data + p * panel_bytes,
                       ahead, target);
  }
}

}  // namespace

void gemm_blocks_avx512(const QuantizedRows& x, Range rows, const BlockWeights& weights,
                        Range panels, const OutputRows& out) {
  static_assert(block_format(BlockType::q4_0).zero == 8 && block_format(BlockType::q4_1).zero == 0);
  const bool has_minimum = weights.format.has_minimum;
  if (weights.format.codes == Codes::iq4) {
    multiply_panels<Format<4, 128, false, Codes::iq4>>(x, rows, weights, panels, out);
  } else if (weights.format.codes == Codes::fp4) {
    multiply_panels<Format<4, 128, false, Codes::fp4>>(x, rows, weights, panels, out);
  } else if (weights.format.bits == 4) {
    has_minimum ? multiply_panels<Format<4, 0, true>>(x, rows, weights, panels, out)
                : multiply_panels<Format<4, 8, false>>(x, rows, weights, panels, out);
  } else {
    has_minimum ? multiply_panels<Format<8, 128, true>>(x, rows, weights, panels, out)
                : multiply_panels<Format<8, 128, false>>(x, rows, weights, panels, out);
  }
}

}  // namespace tokenmill
