// bf16 and float32 products with AVX-512: up to twelve rows times a panel, sums in registers.
//
//                    low   high      the weights' columns, 16 in a register
//     row 0          sum   sum       Per unit along K, two registers of weights meet four bytes of
//     ...                            each row, broadcast: a float, or a pair of bf16.
//     row 11         sum   sum
//
// So many sums hide how long a product takes, and memory has 24 products' time to bring the next
// 128 bytes of weights. A panel meets all rows, part by part along K, so that a part stays in the
// second-level cache; sums wait in memory between parts, unrounded.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "pool.h"

namespace tokenmill {
namespace {

// Loops over rows are unrolled, as sums in an array stay in registers only then.

constexpr int kMostRows = 12;
constexpr int kFewRows = 2;
constexpr int kUnitBytes = 4;                   // of a row
constexpr int kVectorBytes = 64;                // of weights, twice per unit
constexpr std::int64_t kPartBytes = 256 << 10;  // of a panel
constexpr std::int64_t kAhead = 4096;           // bytes that the prefetch runs ahead

// A panel consists of steps along K: the units of the low half, then those of the high half.
struct Bf16Panel {
  static constexpr int kUnits = kStep / 2;  // of a step

  static __m512 multiply_add(__m512i x, __m512i weights, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weights);
  }
};

struct Float32Panel {
  static constexpr int kUnits = 1;

  static __m512 multiply_add(__m512i x, __m512i weights, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weights), sum);
  }
};

template <class Panel>
constexpr std::int64_t kStepBytes = 2 * Panel::kUnits * kVectorBytes;

struct InputRows {
  const char* data;
  std::int64_t stride;  // bytes

  InputRows from(int row, std::int64_t bytes) const { return {data + row * stride + bytes, stride}; }
};

struct Part {
  const char* weights;
  int num_steps;
  bool first, last;
  std::int64_t ahead;  // bytes that the prefetch runs ahead; 0 where the part lies in a cache
};

template <int Rows>
struct Sums {
  __m512 low[Rows], high[Rows];
};

__m512i broadcast_word(const char* data) {
  std::int32_t word;
  std::memcpy(&word, data, kUnitBytes);
  return _mm512_set1_epi32(word);
}

template <class Panel, int Rows>
TOKENMILL_INLINE void add_products(const InputRows& x, const Part& part, Sums<Rows>& sums) {
  // Three addresses and four offsets make twelve rows, and fit the registers.
  const char* rows[3] = {x.data, x.data + 4 * x.stride, x.data + 8 * x.stride};
  const std::int64_t offsets[4] = {0, x.stride, 2 * x.stride, 3 * x.stride};
  const char* weights = part.weights;
  for (int step = 0; step < part.num_steps; ++step, weights += kStepBytes<Panel>) {
#pragma GCC unroll 2
    for (int unit = 0; unit < Panel::kUnits; ++unit) {
      // In the order of addresses, which is not that of reading: so the processor's own prefetcher
      // recognises a stream; without it memory is a third as fast.
      const char* next = weights + 2 * unit * kVectorBytes + part.ahead;
      _mm_prefetch(next, _MM_HINT_T0);
      _mm_prefetch(next + kVectorBytes, _MM_HINT_T0);
      const char* columns = weights + unit * kVectorBytes;
      const __m512i low = _mm512_load_si512(columns);
      const __m512i high = _mm512_load_si512(columns + Panel::kUnits * kVectorBytes);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const __m512i words = broadcast_word(rows[r / 4] + offsets[r % 4]);
        sums.low[r] = Panel::multiply_add(words, low, sums.low[r]);
        sums.high[r] = Panel::multiply_add(words, high, sums.high[r]);
      }
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) rows[i] += kUnitBytes;
    }
  }
}

// The same for very few rows, whose products take less time than their weights: one half after the
// other, in the order of addresses. Memory is faster so, by a quarter, and needs no prefetch.
template <class Panel, int Rows>
TOKENMILL_INLINE void add_few_products(const InputRows& x, const Part& part, Sums<Rows>& sums) {
  const char* rows = x.data;
  const char* weights = part.weights;
  for (int step = 0; step < part.num_steps; ++step, rows += Panel::kUnits * kUnitBytes) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
      for (int unit = 0; unit < Panel::kUnits; ++unit, weights += kVectorBytes) {
        const __m512i columns = _mm512_load_si512(weights);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) {
          const __m512i words = broadcast_word(rows + r * x.stride + unit * kUnitBytes);
          __m512& sum = half == 0 ? sums.low[r] : sums.high[r];
          sum = Panel::multiply_add(words, columns, sum);
        }
      }
      // Words of x are read again rather than kept: so many registers there are not.
      __asm__ volatile("" : : : "memory");
    }
  }
}

// `waiting` are the sums between parts, [Rows, 32].
template <class Panel, int Rows>
void multiply_tile(const InputRows& x, const Part& part, float* waiting, int row,
                   const PanelOutput& out) {
  Sums<Rows> sums;
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const float* from = waiting + r * kPanel;
    sums.low[r] = part.first ? _mm512_setzero_ps() : _mm512_load_ps(from);
    sums.high[r] = part.first ? _mm512_setzero_ps() : _mm512_load_ps(from + kHalf);
  }
  if constexpr (Rows <= kFewRows) {
    add_few_products<Panel, Rows>(x, part, sums);
  } else {
    add_products<Panel, Rows>(x, part, sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    if (part.last) {
      out.store(row + r, 0, sums.low[r]);
      out.store(row + r, 1, sums.high[r]);
    } else {
      _mm512_store_ps(waiting + r * kPanel, sums.low[r]);
      _mm512_store_ps(waiting + r * kPanel + kHalf, sums.high[r]);
    }
  }
}

using Tile = void (*)(const InputRows&, const Part&, float* waiting, int row, const PanelOutput&);

template <class Panel, int Rows = kMostRows>
Tile tile_of(int num_rows) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows) return tile_of<Panel, Rows - 1>(num_rows);
  }
  return multiply_tile<Panel, Rows>;
}

// `panels` lie behind one another from `weights` on, each of `num_steps` steps.
template <class Panel>
void multiply_panels(const InputRows& x, Range rows, const char* weights, int num_steps, int n,
                     Range panels, const OutputRows& out) {
  const int num_rows = rows.end - rows.begin;
  const int num_tiles = ceil_div(num_rows, kMostRows);
  const int tile_rows = ceil_div(num_rows, num_tiles);
  const std::int64_t panel_bytes = num_steps * kStepBytes<Panel>;
  const int num_parts =
      num_tiles == 1 || num_steps == 0 ? 1 : static_cast<int>(ceil_div(panel_bytes, kPartBytes));
  const int part_steps = ceil_div(num_steps, num_parts);
  auto* waiting = static_cast<float*>(thread_scratch(0, sizeof(float) * kPanel * num_rows));
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutput target(out, n, p);
    for (int i = 0; i < num_parts; ++i) {
      const int step = i * part_steps;
      Part part{weights + p * panel_bytes + step * kStepBytes<Panel>,
                min_of(part_steps, num_steps - step), i == 0, i == num_parts - 1, kAhead};
      for (int row = rows.begin; row < rows.end; row += tile_rows) {
        const Tile tile = tile_of<Panel>(min_of(tile_rows, rows.end - row));
        tile(x.from(row, std::int64_t{step} * Panel::kUnits * kUnitBytes), part,
             waiting + (row - rows.begin) * kPanel, row, target);
        part.ahead = 0;
      }
    }
  }
}

template <class T>
InputRows input_rows(const T* data, std::int64_t stride) {
  return {reinterpret_cast<const char*>(data), stride * std::int64_t{sizeof(T)}};
}

}  // namespace

void gemm_bf16_avx512(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                      const OutputRows& out) {
  multiply_panels<Bf16Panel>(input_rows(x.data, x.stride), rows,
                             reinterpret_cast<const char*>(weights.data),
                             ceil_div(weights.k, kStep), weights.n, panels, out);
}

void gemm_float32_avx512(const Float32Rows& x, Range rows, const Float32Weights& weights,
                         Range panels, const OutputRows& out) {
  multiply_panels<Float32Panel>(input_rows(x.data, x.stride), rows,
                                reinterpret_cast<const char*>(weights.data), weights.k, weights.n,
                                panels, out);
}

}  // namespace tokenmill
