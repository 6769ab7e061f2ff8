// Block products with AMX: eight rows times the two halves of a panel, group by group.
//
// A tile product gives the exact integers of one group, and AVX-512 scales and adds them up; the
// latter is the longer part. So that both run at the same time, the integers of a group go through
// memory, and are read while the tiles work at the next one.
//
//                  tmm6   tmm7      codes of the group, 8 quads x 16 columns each
//     even   tmm4  tmm0   tmm1      8 rows of x, 32 values along K
//     odd    tmm5  tmm2   tmm3
//
// A panel is unpacked once (4-bit codes to 8-bit, scales to float32) and used for all rows.
#include <type_traits>

#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "gemm_tiles.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kRows = 8;
constexpr int kFewestRows = 4;  // below this the tiles' fixed cost is higher than AVX-512's work
constexpr int kQuads = kStep / 4;
constexpr int kHalfBytes = kHalf * kStep;  // of 8-bit codes

// A panel as the tiles want it.
struct Panel {
  const std::int8_t* codes;
  std::size_t group_stride;   // bytes from one group's codes to the next
  const float* scales;        // [num_groups, 32]
  const float* minimums;      // [num_groups, 32]
  const char* next;           // packed panel that will be needed next
  std::size_t next_stride;    // its bytes per group
};

struct Scratch {
  std::int8_t* codes;
  float* scales;
  float* minimums;

  explicit Scratch(int num_groups) {
    const std::size_t code_bytes = std::size_t(num_groups) * 2 * kHalfBytes;
    const std::size_t scale_bytes = std::size_t(num_groups) * kPanel * sizeof(float);
    auto* memory = static_cast<char*>(thread_scratch(0, code_bytes + 2 * scale_bytes));
    codes = reinterpret_cast<std::int8_t*>(memory);
    scales = reinterpret_cast<float*>(memory + code_bytes);
    minimums = reinterpret_cast<float*>(memory + code_bytes + scale_bytes);
  }
};

void unpack_codes(const std::uint8_t* group, int zero, std::int8_t* codes) {
  const __m512i low_mask = _mm512_set1_epi8(0x0f);
  const __m512i zeros = _mm512_set1_epi8(static_cast<char>(zero));
  for (int half = 0; half < 2; ++half) {
    for (int quad = 0; quad < kQuads / 2; ++quad) {
      const __m512i both = _mm512_load_si512(group + (half * kQuads / 2 + quad) * 64);
      const __m512i low = _mm512_and_si512(both, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
      std::int8_t* target = codes + half * kHalfBytes + quad * 64;
      _mm512_store_si512(target, _mm512_sub_epi8(low, zeros));
      _mm512_store_si512(target + kHalfBytes / 2, _mm512_sub_epi8(high, zeros));
    }
  }
}

void unpack_scales(const fp16* halves, float* floats) {
  for (int half = 0; half < 2; ++half)
    _mm512_store_ps(floats + half * kHalf,
                    _mm512_cvtph_ps(_mm256_load_si256(
                        reinterpret_cast<const __m256i*>(halves + half * kHalf))));
}

Panel unpack(const std::uint8_t* packed, const BlockFormat& format, int num_groups,
             const Scratch& scratch) {
  const std::size_t group_bytes = format.group_bytes();
  for (int g = 0; g < num_groups; ++g) {
    const std::uint8_t* group = packed + g * group_bytes;
    if (format.bits == 4) unpack_codes(group, format.zero, scratch.codes + g * 2 * kHalfBytes);
    const fp16* scales = reinterpret_cast<const fp16*>(group + format.code_bytes());
    unpack_scales(scales, scratch.scales + g * kPanel);
    if (format.has_minimum) unpack_scales(scales + kPanel, scratch.minimums + g * kPanel);
  }
  const char* next = reinterpret_cast<const char*>(packed + num_groups * group_bytes);
  if (format.bits == 4)
    return {scratch.codes, 2 * kHalfBytes, scratch.scales, scratch.minimums, next, group_bytes};
  return {reinterpret_cast<const std::int8_t*>(packed), group_bytes, scratch.scales,
          scratch.minimums, next, group_bytes};
}

void use_shapes(int num_rows) {
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.set(sums, num_rows, 64);
  shapes.set(4, num_rows, kStep);
  shapes.set(5, num_rows, kStep);
  shapes.set(6, kQuads, 64);
  shapes.set(7, kQuads, 64);
  shapes.use();
}

struct alignas(64) Integers {
  std::int32_t values[2][kRows][kHalf];
};

template <int Odd>
void multiply_group(const std::int8_t* x, std::int64_t stride, const std::int8_t* codes,
                    Integers& integers) {
  load_tile<4 + Odd>(x, stride);
  load_tile<6>(codes, 64);
  load_tile<7>(codes + kHalfBytes, 64);
  zero_tile<2 * Odd>();
  zero_tile<2 * Odd + 1>();
  multiply_int8<2 * Odd, 4 + Odd, 6>();
  multiply_int8<2 * Odd + 1, 4 + Odd, 7>();
  store_tile<2 * Odd>(integers.values[0], 64);
  store_tile<2 * Odd + 1>(integers.values[1], 64);
}

template <int Rows, bool HasMinimum>
inline void add_group(const Integers& integers, const float* scales, const float* minimums,
                      const float* x_scales, const float* x_scaled_sums, int num_groups,
                      __m512 (&sums)[Rows][2]) {
  const __m512 scale[2] = {_mm512_load_ps(scales), _mm512_load_ps(scales + kHalf)};
  __m512 minimum[2];
  if constexpr (HasMinimum) {
    minimum[0] = _mm512_load_ps(minimums);
    minimum[1] = _mm512_load_ps(minimums + kHalf);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const __m512 x_scale = _mm512_set1_ps(x_scales[r * num_groups]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_load_si512(integers.values[half][r]));
      sums[r][half] = _mm512_fmadd_ps(exact, _mm512_mul_ps(scale[half], x_scale), sums[r][half]);
    }
    if constexpr (HasMinimum) {
      const __m512 x_sum = _mm512_set1_ps(x_scaled_sums[r * num_groups]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums[r][half] = _mm512_fmadd_ps(minimum[half], x_sum, sums[r][half]);
    }
  }
}

template <int Rows, bool HasMinimum, bool Prefetch>
void multiply_rows(const QuantizedRows& x, int row, int num_groups, const Panel& panel,
                   const PanelOutput& out) {
  const std::int64_t stride = std::int64_t{num_groups} * kStep;
  const std::int8_t* codes = x.codes + row * stride;
  const float* x_scales = x.scales + std::int64_t{row} * num_groups;
  const float* x_scaled_sums = x.scaled_sums + std::int64_t{row} * num_groups;
  Integers integers[2];
  __m512 sums[Rows][2];
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();

  const auto multiply = [&](int g, auto parity) {
    if constexpr (Prefetch)
      for (std::size_t at = 0; at < panel.next_stride; at += kCacheLine)
        _mm_prefetch(panel.next + g * panel.next_stride + at, _MM_HINT_T0);
    multiply_group<decltype(parity)::value>(codes + g * kStep, stride,
                                         panel.codes + g * panel.group_stride,
                                         integers[decltype(parity)::value]);
  };
  const auto add = [&](int g) {
    add_group<Rows, HasMinimum>(integers[g & 1], panel.scales + g * kPanel,
                                panel.minimums + g * kPanel, x_scales + g, x_scaled_sums + g,
                                num_groups, sums);
  };
  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 1> odd;
  if (num_groups > 0) multiply(0, even);
  int g = 1;
  for (; g + 1 < num_groups; g += 2) {
    multiply(g, odd);
    add(g - 1);
    multiply(g + 1, even);
    add(g);
  }
  if (g < num_groups) {
    multiply(g, odd);
    add(g - 1);
    ++g;
  }
  if (num_groups > 0) add(g - 1);
  for (int r = 0; r < Rows; ++r) {
    out.store(row + r, 0, sums[r][0]);
    out.store(row + r, 1, sums[r][1]);
  }
}

template <int Rows, bool HasMinimum>
void multiply_tail(int num_rows, const QuantizedRows& x, int row, int num_groups,
                   const Panel& panel, const PanelOutput& out) {
  if constexpr (Rows >= kFewestRows) {
    if (num_rows == Rows)
      return multiply_rows<Rows, HasMinimum, true>(x, row, num_groups, panel, out);
    multiply_tail<Rows - 1, HasMinimum>(num_rows, x, row, num_groups, panel, out);
  }
}

template <bool HasMinimum>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const int num_groups = weights.k / kStep;
  const std::size_t panel_bytes = num_groups * weights.format.group_bytes();
  const int full_end = rows.end - (rows.end - rows.begin) % kRows;
  const int tail = rows.end - full_end;
  const Scratch scratch(num_groups);
  for (int p = panels.begin; p < panels.end; ++p) {
    const Panel panel =
        unpack(weights.data + p * panel_bytes, weights.format, num_groups, scratch);
    const PanelOutput target(out, weights.n, p);
    int row = rows.begin;
    if (row < full_end) {
      use_shapes(kRows);
      multiply_rows<kRows, HasMinimum, true>(x, row, num_groups, panel, target);
      for (row += kRows; row < full_end; row += kRows)
        multiply_rows<kRows, HasMinimum, false>(x, row, num_groups, panel, target);
    }
    if (tail > 0) {
      use_shapes(tail);
      multiply_tail<kRows - 1, HasMinimum>(tail, x, row, num_groups, panel, target);
    }
  }
  release_tiles();
}

}  // namespace

void gemm_blocks_amx(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  // The last few rows are the other kernel's: the bits are the same.
  const int tail = (rows.end - rows.begin) % kRows;
  const int end = tail < kFewestRows ? rows.end - tail : rows.end;
  if (rows.begin < end) {
    const Range tiled{rows.begin, end};
    weights.format.has_minimum ? multiply_panels<true>(x, tiled, weights, panels, out)
                               : multiply_panels<false>(x, tiled, weights, panels, out);
  }
  if (end < rows.end) gemm_blocks_avx512(x, {end, rows.end}, weights, panels, out);
}

}  // namespace tokenmill
