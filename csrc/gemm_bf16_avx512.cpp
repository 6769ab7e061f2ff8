// bf16 products with AVX-512: a panel's step times a few rows, sums in registers.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"

namespace tokenmill {
namespace {

// Loops over rows are unrolled, as sums in an array stay in registers only then.

constexpr int kRows = 8;
constexpr int kPairs = kStep / 2;
constexpr std::int64_t kAhead = 4096;  // bytes that the prefetch runs ahead

template <int Rows>
void multiply_rows(const Bf16Rows& x, int row, const bf16* panel, int num_steps,
                   const PanelOutput& out) {
  __m512 sums[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int step = 0; step < num_steps; ++step) {
    const bf16* columns = panel + step * kPanel * kStep;
    for (int pair = 0; pair < kPairs; ++pair, columns += kStep) {
      _mm_prefetch(reinterpret_cast<const char*>(columns) + kAhead, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(columns + kHalf * kStep) + kAhead, _MM_HINT_T0);
      const __m512bh low = (__m512bh)_mm512_load_si512(columns);
      const __m512bh high = (__m512bh)_mm512_load_si512(columns + kHalf * kStep);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        std::int32_t values;
        std::memcpy(&values, x.data + (row + r) * x.stride + step * kStep + 2 * pair, 4);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, low);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, high);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    out.store(row + r, 0, sums[r][0]);
    out.store(row + r, 1, sums[r][1]);
  }
}

template <int Rows>
void multiply_tail(int num_rows, const Bf16Rows& x, int row, const bf16* panel, int num_steps,
                   const PanelOutput& out) {
  if constexpr (Rows > 0) {
    if (num_rows == Rows) return multiply_rows<Rows>(x, row, panel, num_steps, out);
    multiply_tail<Rows - 1>(num_rows, x, row, panel, num_steps, out);
  }
}

}  // namespace

void gemm_bf16_avx512(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                      const OutputRows& out) {
  const int num_steps = ceil_div(weights.k, kStep);
  for (int panel = panels.begin; panel < panels.end; ++panel) {
    const bf16* data = weights.data + std::int64_t{panel} * num_steps * kPanel * kStep;
    const PanelOutput target(out, weights.n, panel);
    int row = rows.begin;
    for (; row + kRows <= rows.end; row += kRows)
      multiply_rows<kRows>(x, row, data, num_steps, target);
    multiply_tail<kRows - 1>(rows.end - row, x, row, data, num_steps, target);
  }
}

}  // namespace tokenmill
