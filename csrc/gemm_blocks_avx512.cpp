// Block products and quantisation with AVX-512: the codes of a panel's group times a few rows.
//
// The multiply instruction takes unsigned weights. 8-bit codes become unsigned by adding 128, and
// the sums start at what that adds; so do 4-bit codes whose zero is not 0.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"

namespace tokenmill {
namespace {

// Loops over rows are unrolled, as sums in an array stay in registers only then.

constexpr int kRows = 4;  // divides QuantizedGroup::kRows, so that they lie in one block
constexpr int kQuads = kStep / 4;
constexpr int kAhead = 8;  // groups that the prefetch runs ahead

__m512i four_values(const std::int8_t* codes) {
  std::int32_t values;
  std::memcpy(&values, codes, 4);
  return _mm512_set1_epi32(values);
}

template <int Rows, int Bits>
TOKENMILL_INLINE void add_codes(const std::uint8_t* group, const std::int8_t* const (&x)[Rows],
               __m512i (&sums)[Rows][2]) {
  const __m512i* codes = reinterpret_cast<const __m512i*>(group);
  if constexpr (Bits == 4) {
    const __m512i low_mask = _mm512_set1_epi8(0x0f);
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads / 2; ++quad) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512i both = _mm512_load_si512(codes + half * kQuads / 2 + quad);
        const __m512i low = _mm512_and_si512(both, low_mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], low, four_values(x[r] + 4 * quad));
          sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], high,
                                              four_values(x[r] + 4 * quad + kStep / 2));
        }
      }
    }
  } else {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512i code = _mm512_xor_si512(
            _mm512_load_si512(codes + half * kQuads + quad), offset);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
          sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], code, four_values(x[r] + 4 * quad));
      }
    }
  }
}

__m512 half_scales(const fp16* scales) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(scales)));
}

template <int Rows, int Bits, bool HasMinimum>
void multiply_rows(const QuantizedRows& x, int row, const BlockWeights& weights,
                   const std::uint8_t* panel, const PanelOutput& out) {
  const BlockFormat format = weights.format;
  const int num_groups = x.num_groups;
  const std::size_t group_bytes = format.group_bytes();
  const int first = row % QuantizedGroup::kRows;
  const int zero = Bits == 8 ? 128 : format.zero;
  __m512 sums[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int g = 0; g < num_groups; ++g) {
    const std::uint8_t* group = panel + g * group_bytes;
    for (std::size_t at = 0; at < group_bytes; at += kCacheLine)
      _mm_prefetch(reinterpret_cast<const char*>(group + kAhead * group_bytes + at), _MM_HINT_T0);

    const QuantizedGroup& x_group = x.block_of(row)[g];
    const std::int8_t* codes[Rows];
    __m512i integers[Rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      codes[r] = x_group.codes[first + r];
      integers[r][0] = integers[r][1] = _mm512_set1_epi32(-zero * x_group.sums[first + r]);
    }
    add_codes<Rows, Bits>(group, codes, integers);

    const fp16* scales = reinterpret_cast<const fp16*>(group + format.code_bytes());
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = half_scales(scales + half * kHalf);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const __m512 x_scale = _mm512_set1_ps(x_group.scales[first + r]);
        sums[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[r][half]),
                                        _mm512_mul_ps(scale, x_scale), sums[r][half]);
      }
      if constexpr (HasMinimum) {
        const __m512 minimum = half_scales(scales + kPanel + half * kHalf);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
          sums[r][half] = _mm512_fmadd_ps(
              minimum, _mm512_set1_ps(x_group.scaled_sums[first + r]), sums[r][half]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    out.store(row + r, 0, sums[r][0]);
    out.store(row + r, 1, sums[r][1]);
  }
}

template <int Rows, int Bits, bool HasMinimum>
void multiply_all(const QuantizedRows& x, Range rows, const BlockWeights& weights,
                  const std::uint8_t* panel, const PanelOutput& out) {
  if constexpr (Rows > 0) {
    int row = rows.begin;
    for (; row + Rows <= rows.end; row += Rows)
      multiply_rows<Rows, Bits, HasMinimum>(x, row, weights, panel, out);
    multiply_all<Rows - 1, Bits, HasMinimum>(x, {row, rows.end}, weights, panel, out);
  }
}

template <int Bits, bool HasMinimum>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const std::size_t panel_bytes = weights.k / kStep * weights.format.group_bytes();
  for (int panel = panels.begin; panel < panels.end; ++panel)
    multiply_all<kRows, Bits, HasMinimum>(x, rows, weights, weights.data + panel * panel_bytes,
                                          PanelOutput(out, weights.n, panel));
}

struct Group {
  __m512 low, high;  // 32 values
};

Group load_group(const FloatRows& x, std::int64_t at) {
  if (x.is_bf16) {
    const __m512i values = _mm512_loadu_si512(static_cast<const bf16*>(x.data) + at);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(values));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(values, 1));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)),
            _mm512_castsi512_ps(_mm512_slli_epi32(high, 16))};
  }
  const float* values = static_cast<const float*>(x.data) + at;
  return {_mm512_loadu_ps(values), _mm512_loadu_ps(values + kHalf)};
}

}  // namespace

void gemm_blocks_avx512(const QuantizedRows& x, Range rows, const BlockWeights& weights,
                        Range panels, const OutputRows& out) {
  const BlockFormat format = weights.format;
  if (format.bits == 4) {
    format.has_minimum ? multiply_panels<4, true>(x, rows, weights, panels, out)
                       : multiply_panels<4, false>(x, rows, weights, panels, out);
  } else {
    format.has_minimum ? multiply_panels<8, true>(x, rows, weights, panels, out)
                       : multiply_panels<8, false>(x, rows, weights, panels, out);
  }
}

void quantize_rows_avx512(const FloatRows& x, Range rows, const QuantizedRows& out) {
  constexpr float kSmallest = 1e-30f;  // below this a group counts as zero; 127 / it is finite
  for (int row = rows.begin; row < rows.end; ++row) {
    const int r = row % QuantizedGroup::kRows;
    for (int g = 0; g < out.num_groups; ++g) {
      const Group group = load_group(x, row * x.stride + g * kStep);
      const float largest = _mm512_reduce_max_ps(
          _mm512_max_ps(_mm512_abs_ps(group.low), _mm512_abs_ps(group.high)));
      const bool has_nan = _mm512_cmp_ps_mask(group.low, group.high, _CMP_UNORD_Q) != 0;
      const bool is_zero = largest < kSmallest;
      const float scale = has_nan ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
      const __m512 inverse = _mm512_set1_ps(has_nan || is_zero ? 0.0f : 127.0f / largest);
      const __m128i low = _mm512_cvtsepi32_epi8(
          _mm512_cvtps_epi32(_mm512_mul_ps(group.low, inverse)));
      const __m128i high = _mm512_cvtsepi32_epi8(
          _mm512_cvtps_epi32(_mm512_mul_ps(group.high, inverse)));
      const int sum = _mm512_reduce_add_epi32(
          _mm512_add_epi32(_mm512_cvtepi8_epi32(low), _mm512_cvtepi8_epi32(high)));

      QuantizedGroup& target = out.block_of(row)[g];
      _mm_store_si128(reinterpret_cast<__m128i*>(target.codes[r]), low);
      _mm_store_si128(reinterpret_cast<__m128i*>(target.codes[r] + kHalf), high);
      target.scales[r] = scale;
      target.scaled_sums[r] = static_cast<float>(sum) * scale;
      target.sums[r] = sum;
    }
  }
}

}  // namespace tokenmill
