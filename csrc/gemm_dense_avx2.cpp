// bf16 and float32 products with AVX2: some rows times half a panel, or times a panel where there
// are few rows, so that memory is read in the order of addresses.
//
// Rows of x are float32: a value is broadcast from memory by the instruction that loads it. bf16
// rows are widened once for all panels of a task, and bf16 weights in registers, where they come in
// pairs: the even values shifted up, the odd ones masked. A sum takes one fused multiply-add after
// another along K, whatever the tile is.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store_avx2.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kFewRows = 2;
constexpr std::int64_t kAhead = 2048;  // bytes that the prefetch runs ahead

struct WideRows {
  const float* data;
  std::int64_t stride;
};

TOKENMILL_INLINE __m256 even_values(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
TOKENMILL_INLINE __m256 odd_values(__m256i pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// How panels lie. `Parts` neighbouring registers of columns are multiplied; `part` is the first.
struct Float32Panel {
  using Value = float;
  static constexpr int kMostRows = 6;

  static std::int64_t panel_values(int k) { return std::int64_t{k} * kPanel; }

  template <int Rows, int Parts>
  static TOKENMILL_INLINE void add(const WideRows& x, int k, const float* panel, int part,
                                   __m256 (&sums)[Rows][Parts]) {
    const float* columns = panel + part * kEight;
    for (int value = 0; value < k; ++value, columns += kPanel) {
      _mm_prefetch(reinterpret_cast<const char*>(columns) + kAhead, _MM_HINT_T0);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const __m256 broadcast = _mm256_broadcast_ss(x.data + r * x.stride + value);
#pragma GCC unroll 4
        for (int p = 0; p < Parts; ++p)
          sums[r][p] = _mm256_fmadd_ps(broadcast, _mm256_load_ps(columns + p * kEight), sums[r][p]);
      }
    }
  }
};

struct Bf16Panel {
  using Value = bf16;
  static constexpr int kMostRows = 5;

  static std::int64_t panel_values(int k) { return std::int64_t{round_up(k, kStep)} * kPanel; }

  template <int Rows, int Parts>
  static TOKENMILL_INLINE void add(const WideRows& x, int k, const bf16* panel, int part,
                                   __m256 (&sums)[Rows][Parts]) {
    constexpr int kPairs = kStep / 2, kHalfValues = kHalf * kStep;
    for (int step = 0; step < ceil_div(k, kStep); ++step, panel += kPanel * kStep) {
#pragma GCC unroll 2
      for (int h = 0; h < Parts / 2; ++h) {
        const bf16* columns = panel + (part / 2 + h) * kHalfValues;
        const float* values = x.data + step * kStep;
        for (int pair = 0; pair < kPairs; ++pair, columns += 2 * kHalf, values += 2) {
          _mm_prefetch(reinterpret_cast<const char*>(columns) + kAhead, _MM_HINT_T0);
          const auto* words = reinterpret_cast<const __m256i*>(columns);
          add_values<Rows, Parts>(values, x.stride, h, even_values(_mm256_load_si256(words)),
                                  even_values(_mm256_load_si256(words + 1)), sums);
          add_values<Rows, Parts>(values + 1, x.stride, h, odd_values(_mm256_load_si256(words)),
                                  odd_values(_mm256_load_si256(words + 1)), sums);
        }
      }
    }
  }

  template <int Rows, int Parts>
  static TOKENMILL_INLINE void add_values(const float* x, std::int64_t stride, int half, __m256 low,
                                          __m256 high, __m256 (&sums)[Rows][Parts]) {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const __m256 broadcast = _mm256_broadcast_ss(x + r * stride);
      sums[r][2 * half] = _mm256_fmadd_ps(broadcast, low, sums[r][2 * half]);
      sums[r][2 * half + 1] = _mm256_fmadd_ps(broadcast, high, sums[r][2 * half + 1]);
    }
  }
};

template <class Panel, int Rows, int Parts>
void multiply_parts(const WideRows& x, int k, const typename Panel::Value* panel, int part, int row,
                    const PanelOutputAvx2& out) {
  __m256 sums[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) sums[r][p] = _mm256_setzero_ps();
  Panel::template add<Rows, Parts>(x, k, panel, part, sums);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) out.store(row + r, part + p, sums[r][p]);
}

template <class Panel, int Rows = Panel::kMostRows>
void multiply_tile(int num_rows, const WideRows& x, int k, const typename Panel::Value* panel,
                   int row, const PanelOutputAvx2& out) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return multiply_tile<Panel, Rows - 1>(num_rows, x, k, panel, row, out);
  }
  if constexpr (Rows <= kFewRows) {
    multiply_parts<Panel, Rows, 4>(x, k, panel, 0, row, out);
  } else {
    multiply_parts<Panel, Rows, 2>(x, k, panel, 0, row, out);
    multiply_parts<Panel, Rows, 2>(x, k, panel, 2, row, out);
  }
}

template <class Panel>
void multiply_panels(const WideRows& x, Range rows, const typename Panel::Value* weights, int k,
                     int n, Range panels, const OutputRows& out) {
  const int num_rows = rows.end - rows.begin;
  const int num_tiles = ceil_div(num_rows, Panel::kMostRows);
  const int tile_rows = ceil_div(num_rows, num_tiles);
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutputAvx2 target(out, n, p);
    for (int r = 0; r < num_rows; r += tile_rows)
      multiply_tile<Panel>(min_of(tile_rows, num_rows - r), {x.data + r * x.stride, x.stride}, k,
                           weights + p * Panel::panel_values(k), rows.begin + r, target);
  }
}

// The rows as floats; k is a multiple of 32.
WideRows widen(const Bf16Rows& x, Range rows, int k) {
  auto* values = static_cast<float*>(
      thread_scratch(0, sizeof(float) * std::size_t(k) * (rows.end - rows.begin)));
  float* target = values;
  for (int row = rows.begin; row < rows.end; ++row, target += k) {
    const bf16* source = x.data + row * x.stride;
    for (int i = 0; i < k; i += kEight) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(target + i, even_values(_mm256_cvtepu16_epi32(halves)));
    }
  }
  return {values, k};
}

}  // namespace

void gemm_bf16_avx2(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                    const OutputRows& out) {
  const WideRows wide = widen(x, rows, round_up(weights.k, kStep));
  multiply_panels<Bf16Panel>(wide, rows, weights.data, weights.k, weights.n, panels, out);
}

void gemm_float32_avx2(const Float32Rows& x, Range rows, const Float32Weights& weights,
                       Range panels, const OutputRows& out) {
  multiply_panels<Float32Panel>({x.data + rows.begin * x.stride, x.stride}, rows, weights.data,
                                weights.k, weights.n, panels, out);
}

}  // namespace tokenmill
