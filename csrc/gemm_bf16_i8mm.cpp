// bf16 products with NEON's matrix products of bf16: two rows times two columns, four values of
// each, which are two pairs of the packed panel side by side. One order of additions serves all
// shapes of tiles; the last of an odd number of rows is multiplied twice and stored once.
#include "gemm_kernels.h"
#include "gemm_store_quads.h"
#include "repeat.h"

namespace tokenmill {
namespace {

constexpr int kMostPairs = 4;            // of rows: 16 sums with eight columns
constexpr int kFours = kStep / 4;        // along K
constexpr int kTileParts = 2;            // vectors of four columns
constexpr std::int64_t kAhead = 1024;    // bytes that the prefetch runs ahead

TOKENMILL_INLINE bfloat16x8_t as_bf16(I32x4 bits) { return (bfloat16x8_t)bits; }

// Four values of two rows.
TOKENMILL_INLINE bfloat16x8_t load_rows(const bf16* first, const bf16* second) {
  std::int64_t low, high;
  std::memcpy(&low, first, sizeof low);
  std::memcpy(&high, second, sizeof high);
  return as_bf16(bits_as<I32x4>(I64x2{low, high}));
}

// Rows 2 * pair and the next one, from `row` on; not beyond the last one.
template <int Pairs>
TOKENMILL_INLINE void multiply_tile(const Bf16Rows& x, int row, int last, int k, const bf16* panel,
                                    int part, const PanelOutputQuads& out) {
  const bf16* rows[2 * Pairs];
  for (int r = 0; r < 2 * Pairs; ++r) rows[r] = x.data + min_of(row + r, last) * x.stride;
  // Columns 0 and 1 of a row, then of the next, and the same of columns 2 and 3.
  float32x4_t low[Pairs][kTileParts], high[Pairs][kTileParts];
  repeat<Pairs>([&](auto p) TOKENMILL_INLINE_LAMBDA {
    repeat<kTileParts>([&](auto c) TOKENMILL_INLINE_LAMBDA {
      low[p.value][c.value] = high[p.value][c.value] = F32x4{};
    });
  });
  constexpr int kHalfParts = kParts / 2;
  const bf16* columns =
      panel + part / kHalfParts * kHalf * kStep + part % kHalfParts * 2 * kQuad;
  for (int step = 0; step < k; step += kStep, columns += kPanel * kStep) {
    for (int four = 0; four < kFours; ++four) {
      const bf16* at = columns + four * 4 * kHalf;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead);
      bfloat16x8_t values[Pairs];
      repeat<Pairs>([&](auto p) TOKENMILL_INLINE_LAMBDA {
        values[p.value] = load_rows(rows[2 * p.value] + step + 4 * four,
                                    rows[2 * p.value + 1] + step + 4 * four);
      });
      repeat<kTileParts>([&](auto c) TOKENMILL_INLINE_LAMBDA {
        const I32x4 first = load_as<I32x4>(at + c.value * 2 * kQuad);
        const I32x4 second = load_as<I32x4>(at + 2 * kHalf + c.value * 2 * kQuad);
        const bfloat16x8_t two = as_bf16(vzip1q_s32(first, second));
        const bfloat16x8_t others = as_bf16(vzip2q_s32(first, second));
        repeat<Pairs>([&](auto p) TOKENMILL_INLINE_LAMBDA {
          low[p.value][c.value] = vbfmmlaq_f32(low[p.value][c.value], values[p.value], two);
          high[p.value][c.value] = vbfmmlaq_f32(high[p.value][c.value], values[p.value], others);
        });
      });
    }
  }
  repeat<Pairs>([&](auto p) TOKENMILL_INLINE_LAMBDA {
    repeat<kTileParts>([&](auto c) TOKENMILL_INLINE_LAMBDA {
      const float32x4_t a = low[p.value][c.value], b = high[p.value][c.value];
      out.store(row + 2 * p.value, part + c.value, vcombine_f32(vget_low_f32(a), vget_low_f32(b)));
      if (row + 2 * p.value < last)
        out.store(row + 2 * p.value + 1, part + c.value,
                  vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
    });
  });
}

template <int Pairs = kMostPairs>
void multiply_rows(int num_pairs, const Bf16Rows& x, int row, int last, int k, const bf16* panel,
                   const PanelOutputQuads& out) {
  if constexpr (Pairs > 1) {
    if (num_pairs < Pairs)
      return multiply_rows<Pairs - 1>(num_pairs, x, row, last, k, panel, out);
  }
  for (int part = 0; part < kParts; part += kTileParts)
    multiply_tile<Pairs>(x, row, last, k, panel, part, out);
}

}  // namespace

void gemm_bf16_i8mm(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                    const OutputRows& out) {
  const int num_pairs = ceil_div(rows.end - rows.begin, 2);
  const int tile_pairs = ceil_div(num_pairs, ceil_div(num_pairs, kMostPairs));
  const std::int64_t panel_values = std::int64_t{round_up(weights.k, kStep)} * kPanel;
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutputQuads target(out, weights.n, p);
    for (int pair = 0; pair < num_pairs; pair += tile_pairs)
      multiply_rows(min_of(tile_pairs, num_pairs - pair), x, rows.begin + 2 * pair, rows.end - 1,
                    weights.k, weights.data + p * panel_values, target);
  }
}

}  // namespace tokenmill
