// Low-rank adapters with AVX-512.
//
// Shrinking sums along k, sixteen values at a time, four ranks of several rows at once; expanding
// sums along the rank, 32 columns of several rows at once. How many rows are taken at once changes
// no sum.
#include "elementwise_math.h"
#include "lora.h"
#include "pool.h"

namespace tokenmill {
namespace {

#if defined(TOKENMILL_WIDE_REGISTERS)
constexpr int kRowsAtOnce = 1;
#else
constexpr int kRowsAtOnce = 4;
#endif
constexpr int kRanks = AdapterTables::kRanks;

// A row of x as floats: its own memory, or `room` [in_features] that it is written to.
const float* floats_of(const AdapterCall& call, int row, float* room) {
  const int k = call.tables->in_features;
  if (call.x.data == nullptr) {
    const QuantizedGroup* groups = call.quantized.block_of(row);
    const int within = row % QuantizedGroup::kRows;
    for (int g = 0; g < call.quantized.num_groups; ++g) {
      const QuantizedGroup& group = groups[g];
      const float scale = group.scales[within];
      for (int i = 0; i < kStep; ++i)
        room[g * kStep + i] = static_cast<float>(group.codes[within][i]) * scale;
    }
    return room;
  }
  const std::int64_t begin = row * call.x.stride;
  if (!call.x.is_bf16) return static_cast<const float*>(call.x.data) + begin;
  for (int at = 0; at < k; at += 16) {
    const __mmask16 mask = first_lanes(k - at);
    _mm512_mask_storeu_ps(room + at, mask, load_values(call.x.data, true, begin + at, mask));
  }
  return room;
}

// sums[row][rank] of four ranks, from `a` on, whose rows lie one after another.
template <int Rows, bool IsBf16>
void shrink_tile(const float* const* x, const char* a, int k, float (*sums)[kRanks]) {
  __m512 totals[Rows][kRanks];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int rank = 0; rank < kRanks; ++rank) totals[row][rank] = _mm512_setzero_ps();
  }
  const auto add = [&](int at, __mmask16 mask) TOKENMILL_INLINE_LAMBDA {
    __m512 weights[kRanks];
#pragma GCC unroll 4
    for (int rank = 0; rank < kRanks; ++rank)
      weights[rank] = load_values(a, IsBf16, std::int64_t{rank} * k + at, mask);
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
      const __m512 values = _mm512_maskz_loadu_ps(mask, x[row] + at);
#pragma GCC unroll 4
      for (int rank = 0; rank < kRanks; ++rank)
        totals[row][rank] = _mm512_fmadd_ps(values, weights[rank], totals[row][rank]);
    }
  };
  int at = 0;
  for (; at + 16 <= k; at += 16) add(at, 0xffff);
  if (at < k) add(at, first_lanes(k - at));
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int rank = 0; rank < kRanks; ++rank)
      sums[row][rank] = _mm512_reduce_add_ps(totals[row][rank]);
  }
}

template <int Rows>
void shrink_to(const AdapterCall& call, const AdapterTask& task, Range ranks,
               const float* const* x, const int* rows) {
  const AdapterTables& tables = *call.tables;
  const float scale = tables.scale(task.tile.slot, task.part);
  for (int first = ranks.begin; first < ranks.end; first += kRanks) {
    const char* a = tables.a_row(task.tile.slot, task.part, first);
    float sums[Rows][kRanks];
    if (tables.is_bf16) {
      shrink_tile<Rows, true>(x, a, tables.in_features, sums);
    } else {
      shrink_tile<Rows, false>(x, a, tables.in_features, sums);
    }
    for (int row = 0; row < Rows; ++row) {
      float* low = call.low_of(rows[row], task.part) + first;
      for (int rank = 0; rank < kRanks && first + rank < ranks.end; ++rank)
        low[rank] = sums[row][rank] * scale;
    }
  }
}

// Columns of one panel of some rows.
template <int Rows, bool IsBf16>
void expand_panel(const AdapterCall& call, const AdapterTask& task, int panel, const int* rows) {
  const AdapterTables& tables = *call.tables;
  const AdapterTables::Part& part = tables.parts[task.part];
  const int rank = tables.rank(task.tile.slot, task.part);
  const char* b = tables.b_panel(task.tile.slot, task.part, panel);
  const float* low[Rows];
  __m512 lower[Rows], upper[Rows];
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
    low[row] = call.low_of(rows[row], task.part);
    lower[row] = upper[row] = _mm512_setzero_ps();
  }
  for (int r = 0; r < rank; ++r) {
    const __m512 left = load_values(b, IsBf16, r * kPanel, 0xffff);
    const __m512 right = load_values(b, IsBf16, r * kPanel + kHalf, 0xffff);
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
      const __m512 factor = _mm512_set1_ps(low[row][r]);
      lower[row] = _mm512_fmadd_ps(factor, left, lower[row]);
      upper[row] = _mm512_fmadd_ps(factor, right, upper[row]);
    }
  }
  const int within = panel * kPanel, column = part.first_column + within;
  const __mmask16 masks[2] = {first_lanes(part.num_columns - within),
                              first_lanes(part.num_columns - within - kHalf)};
  const TokenRows& out = call.out;
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
    const std::int64_t at = rows[row] * out.stride + column;
    for (int half = 0; half < 2; ++half) {
      const std::int64_t place = at + half * kHalf;
      if (masks[half] == 0) continue;
      const __m512 before = load_values(out.data, out.is_bf16, place, masks[half]);
      store_values(out.data, out.is_bf16, place, masks[half],
                   _mm512_add_ps(before, half == 0 ? lower[row] : upper[row]));
    }
  }
}

template <int Rows>
void expand_to(const AdapterCall& call, const AdapterTask& task, Range panels, const int* rows) {
  for (int panel = panels.begin; panel < panels.end; ++panel) {
    if (call.tables->is_bf16) {
      expand_panel<Rows, true>(call, task, panel, rows);
    } else {
      expand_panel<Rows, false>(call, task, panel, rows);
    }
  }
}

}  // namespace

void shrink_rows_avx512(const AdapterCall& call, const AdapterTask& task, Range ranks) {
  const AdapterRows::Tile& tile = task.tile;
  const int* rows = call.rows->order().data() + tile.begin;
  const int k = round_up(call.tables->in_features, 16);
  auto* room = static_cast<float*>(
      thread_scratch(3, sizeof(float) * std::size_t(k) * AdapterRows::kTileRows));
  const float* x[AdapterRows::kTileRows];
  for (int i = 0; i < tile.count; ++i)
    x[i] = floats_of(call, rows[i], room + std::int64_t{i} * k);
  int i = 0;
  for (; i + kRowsAtOnce <= tile.count; i += kRowsAtOnce)
    shrink_to<kRowsAtOnce>(call, task, ranks, x + i, rows + i);
  for (; i < tile.count; ++i) shrink_to<1>(call, task, ranks, x + i, rows + i);
}

void expand_rows_avx512(const AdapterCall& call, const AdapterTask& task, Range panels) {
  const AdapterRows::Tile& tile = task.tile;
  const int* rows = call.rows->order().data() + tile.begin;
  int i = 0;
  for (; i + kRowsAtOnce <= tile.count; i += kRowsAtOnce)
    expand_to<kRowsAtOnce>(call, task, panels, rows + i);
  for (; i < tile.count; ++i) expand_to<1>(call, task, panels, rows + i);
}

}  // namespace tokenmill
