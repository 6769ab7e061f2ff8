// bf16 products with AMX: two tiles of rows times the two halves of a panel.
//
//             tmm6   tmm7      panel, 16 pairs x 16 columns each
//     tmm4    tmm0   tmm1      rows 0..15 of x, 32 values along K
//     tmm5    tmm2   tmm3      rows 16..31
//
// A panel meets all rows, part by part along K: a part stays in the first-level cache while the
// rows stream past it. Sums wait in memory between parts, unrounded.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "gemm_tiles.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kTile = 16;               // rows of a full tile
constexpr int kRowBytes = 64;           // of a full tile
constexpr int kHalfValues = kHalf * kStep;
constexpr int kStepValues = kPanel * kStep;
constexpr int kMostSteps = 18;          // of a part: 36 KiB
constexpr std::int64_t kAhead = 8192;   // bytes that the prefetch runs ahead

// Tiles for blocks of up to 32 rows; the tiles of x and of the sums have only the rows there are.
void use_shapes(int num_rows) {
  TileShapes shapes;
  const int upper = min_of(num_rows, kTile), lower = num_rows - upper;
  shapes.set(0, upper, kRowBytes);
  shapes.set(1, upper, kRowBytes);
  shapes.set(4, upper, kRowBytes);
  if (lower > 0) {
    shapes.set(2, lower, kRowBytes);
    shapes.set(3, lower, kRowBytes);
    shapes.set(5, lower, kRowBytes);
  }
  shapes.set(6, kTile, kRowBytes);
  shapes.set(7, kTile, kRowBytes);
  shapes.use();
}

void prefetch_step(const bf16* columns) {
  const char* data = reinterpret_cast<const char*>(columns) + kAhead;
  for (int line = 0; line < 2 * kTile; ++line)
    _mm_prefetch(data + line * 64, _MM_HINT_T0);
}

struct Part {
  Range steps;
  bool first, last;
};

template <bool TwoTiles>
void begin_sums(const Part& part, const float* sums) {
  if (part.first) {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (TwoTiles) {
      zero_tile<2>();
      zero_tile<3>();
    }
  } else {
    constexpr std::int64_t kStride = kPanel * sizeof(float);
    load_tile<0>(sums, kStride);
    load_tile<1>(sums + kHalf, kStride);
    if constexpr (TwoTiles) {
      load_tile<2>(sums + kTile * kPanel, kStride);
      load_tile<3>(sums + kTile * kPanel + kHalf, kStride);
    }
  }
}

template <bool TwoTiles>
void end_sums(float* sums) {
  constexpr std::int64_t kStride = kPanel * sizeof(float);
  store_tile<0>(sums, kStride);
  store_tile<1>(sums + kHalf, kStride);
  if constexpr (TwoTiles) {
    store_tile<2>(sums + kTile * kPanel, kStride);
    store_tile<3>(sums + kTile * kPanel + kHalf, kStride);
  }
}

template <bool TwoTiles>
void multiply(const bf16* x, std::int64_t stride, const bf16* panel, Range steps, bool prefetch) {
  const std::int64_t stride_bytes = stride * sizeof(bf16);
  for (int step = steps.begin; step < steps.end; ++step) {
    const bf16* columns = panel + step * kStepValues;
    if (prefetch) prefetch_step(columns);
    stream_tile<4>(x + step * kStep, stride_bytes);
    load_tile<6>(columns, kRowBytes);
    load_tile<7>(columns + kHalfValues, kRowBytes);
    if constexpr (TwoTiles) stream_tile<5>(x + step * kStep + kTile * stride, stride_bytes);
    multiply_bf16<0, 4, 6>();
    multiply_bf16<1, 4, 7>();
    if constexpr (TwoTiles) {
      multiply_bf16<2, 5, 6>();
      multiply_bf16<3, 5, 7>();
    }
  }
}

// Blocks of `block_rows` rows times part of a panel. `sums` is [rows, 32].
template <bool TwoTiles>
void multiply_blocks(const Bf16Rows& x, Range rows, int block_rows, const bf16* panel,
                     const Part& part, float* sums, const PanelOutput& out) {
  for (int row = rows.begin; row < rows.end; row += block_rows, sums += block_rows * kPanel) {
    begin_sums<TwoTiles>(part, sums);
    // The first block reads the panel from memory, the others from the cache.
    multiply<TwoTiles>(x.data + row * x.stride, x.stride, panel, part.steps, row == rows.begin);
    end_sums<TwoTiles>(sums);
    if (!part.last) continue;
    for (int r = 0; r < block_rows; ++r) {
      out.store(row + r, 0, _mm512_load_ps(sums + r * kPanel));
      out.store(row + r, 1, _mm512_load_ps(sums + r * kPanel + kHalf));
    }
  }
}

// All panels times rows that are a multiple of `block_rows`, at most 32.
void multiply_panels(const Bf16Rows& x, Range rows, int block_rows, const Bf16Weights& weights,
                     Range panels, const OutputRows& out) {
  const int num_rows = rows.end - rows.begin;
  const int num_steps = ceil_div(weights.k, kStep);
  const int num_parts =
      num_rows > block_rows && num_steps > kMostSteps ? ceil_div(num_steps, kMostSteps) : 1;
  const int part_steps = ceil_div(num_steps, num_parts);
  auto* sums = static_cast<float*>(
      thread_scratch(0, sizeof(float) * kPanel * round_up(num_rows, 2 * kTile)));
  use_shapes(block_rows);
  for (int p = panels.begin; p < panels.end; ++p) {
    const bf16* panel = weights.data + std::int64_t{p} * num_steps * kStepValues;
    const PanelOutput target(out, weights.n, p);
    for (int i = 0; i < num_parts; ++i) {
      const Part part{{i * part_steps, min_of((i + 1) * part_steps, num_steps)},
                      i == 0, i == num_parts - 1};
      block_rows > kTile
          ? multiply_blocks<true>(x, rows, block_rows, panel, part, sums, target)
          : multiply_blocks<false>(x, rows, block_rows, panel, part, sums, target);
    }
  }
}

}  // namespace

void gemm_bf16_amx(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                   const OutputRows& out) {
  const int tail = (rows.end - rows.begin) % (2 * kTile);
  const int full_end = rows.end - tail;
  if (rows.begin < full_end)
    multiply_panels(x, {rows.begin, full_end}, 2 * kTile, weights, panels, out);
  if (tail > 0) multiply_panels(x, {full_end, rows.end}, tail, weights, panels, out);
  release_tiles();
}

}  // namespace tokenmill
