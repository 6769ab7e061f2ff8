// bf16 and float32 products on any processor: some rows times 16 columns, or times a panel where
// there is one row, so that memory is read in the order of addresses.
//
// Rows of x are float32, each value of which is multiplied with vectors of four columns. bf16 rows
// are widened once for all panels of a task, and bf16 weights in registers, where they come in
// pairs: the even values shifted up, the odd ones masked. A sum takes one multiply-add after another
// along K, whatever the tile is.
#include "gemm_kernels.h"
#include "gemm_store_quads.h"
#include "pool.h"

namespace tokenmill {
namespace {

#if defined(__ARM_NEON)
constexpr int kMostRows = 6;  // 24 sums, four vectors of columns and a value of 32 registers
#else
constexpr int kMostRows = 3;  // 12 sums, a vector of columns, a value and a product of 16
#endif
constexpr int kTileParts = 4;
constexpr std::int64_t kAhead = 1024;  // bytes that the prefetch runs ahead

struct WideRows {
  const float* data;
  std::int64_t stride;
};

template <int Rows, int Parts>
TOKENMILL_INLINE void add_values(const float* x, std::int64_t stride, const F32x4 (&columns)[Parts],
                                 F32x4 (&sums)[Rows][Parts]) {
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const F32x4 value = splat(x[r * stride]);
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) sums[r][p] = multiply_add(value, columns[p], sums[r][p]);
  }
}

// How panels lie. `Parts` neighbouring vectors of columns are multiplied; `part` is the first.
struct Float32Panel {
  using Value = float;

  static std::int64_t panel_values(int k) { return std::int64_t{k} * kPanel; }

  template <int Rows, int Parts>
  static TOKENMILL_INLINE void add(const WideRows& x, int k, const float* panel, int part,
                                   F32x4 (&sums)[Rows][Parts]) {
    const float* columns = panel + part * kQuad;
    for (int value = 0; value < k; ++value, columns += kPanel) {
      __builtin_prefetch(reinterpret_cast<const char*>(columns) + kAhead);
      F32x4 vectors[Parts];
#pragma GCC unroll 8
      for (int p = 0; p < Parts; ++p) vectors[p] = load_as<F32x4>(columns + p * kQuad);
      add_values<Rows, Parts>(x.data + value, x.stride, vectors, sums);
    }
  }
};

struct Bf16Panel {
  using Value = bf16;

  static std::int64_t panel_values(int k) { return std::int64_t{round_up(k, kStep)} * kPanel; }

  // A half of a step has 16 columns; eight parts are both.
  template <int Rows, int Parts>
  static TOKENMILL_INLINE void add(const WideRows& x, int k, const bf16* panel, int part,
                                   F32x4 (&sums)[Rows][Parts]) {
    constexpr int kPairs = kStep / 2, kHalfValues = kHalf * kStep;
    for (int step = 0; step < ceil_div(k, kStep); ++step, panel += kPanel * kStep) {
      const bf16* columns = panel + part / kTileParts * kHalfValues;
      const float* values = x.data + step * kStep;
      for (int pair = 0; pair < kPairs; ++pair, columns += 2 * kHalf, values += 2) {
        __builtin_prefetch(reinterpret_cast<const char*>(columns) + kAhead);
        F32x4 even[Parts], odd[Parts];
#pragma GCC unroll 8
        for (int p = 0; p < Parts; ++p) {
          const I32x4 pairs = load_as<I32x4>(columns + p / kTileParts * kHalfValues +
                                             p % kTileParts * 2 * kQuad);
          even[p] = even_values(pairs);
          odd[p] = odd_values(pairs);
        }
        add_values<Rows, Parts>(values, x.stride, even, sums);
        add_values<Rows, Parts>(values + 1, x.stride, odd, sums);
      }
    }
  }
};

template <class Panel, int Rows, int Parts>
void multiply_parts(const WideRows& x, int k, const typename Panel::Value* panel, int part, int row,
                    const PanelOutputQuads& out) {
  F32x4 sums[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) sums[r][p] = F32x4{};
  Panel::template add<Rows, Parts>(x, k, panel, part, sums);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) out.store(row + r, part + p, sums[r][p]);
}

template <class Panel, int Rows = kMostRows>
void multiply_tile(int num_rows, const WideRows& x, int k, const typename Panel::Value* panel,
                   int row, const PanelOutputQuads& out) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return multiply_tile<Panel, Rows - 1>(num_rows, x, k, panel, row, out);
    for (int part = 0; part < kParts; part += kTileParts)
      multiply_parts<Panel, Rows, kTileParts>(x, k, panel, part, row, out);
  } else {
    multiply_parts<Panel, 1, kParts>(x, k, panel, 0, row, out);
  }
}

template <class Panel>
void multiply_panels(const WideRows& x, Range rows, const typename Panel::Value* weights, int k,
                     int n, Range panels, const OutputRows& out) {
  const int num_rows = rows.end - rows.begin;
  const int tile_rows = ceil_div(num_rows, ceil_div(num_rows, kMostRows));
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutputQuads target(out, n, p);
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
    for (int i = 0; i < k; i += 8) {
      const U16x8 halves = load_as<U16x8>(source + i);
      store_as(target + i, floats_low(halves));
      store_as(target + i + 4, floats_high(halves));
    }
  }
  return {values, k};
}

}  // namespace

void gemm_bf16_portable(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                        const OutputRows& out) {
  const WideRows wide = widen(x, rows, round_up(weights.k, kStep));
  multiply_panels<Bf16Panel>(wide, rows, weights.data, weights.k, weights.n, panels, out);
}

void gemm_float32_portable(const Float32Rows& x, Range rows, const Float32Weights& weights,
                           Range panels, const OutputRows& out) {
  multiply_panels<Float32Panel>({x.data + rows.begin * x.stride, x.stride}, rows, weights.data,
                                weights.k, weights.n, panels, out);
}

}  // namespace tokenmill
