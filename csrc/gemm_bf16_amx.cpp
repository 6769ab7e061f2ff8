// bf16 products with AMX: two tiles of rows times the two halves of a panel.
//
//             tmm6   tmm7      panel, 16 pairs x 16 columns each
//     tmm4    tmm0   tmm1      rows 0..15 of x, 32 values along K
//     tmm5    tmm2   tmm3      rows 16..31
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "gemm_tiles.h"

namespace tokenmill {
namespace {

constexpr int kTile = 16;               // rows of a full tile
constexpr int kRowBytes = 64;           // of a full tile
constexpr int kHalfValues = kHalf * kStep;
constexpr int kStepValues = kPanel * kStep;
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

template <bool TwoTiles, bool Prefetch>
void multiply(const bf16* x, std::int64_t stride, const bf16* panel, int num_steps) {
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (TwoTiles) {
    zero_tile<2>();
    zero_tile<3>();
  }
  const std::int64_t stride_bytes = stride * sizeof(bf16);
  for (int step = 0; step < num_steps; ++step) {
    const bf16* columns = panel + step * kStepValues;
    if constexpr (Prefetch) prefetch_step(columns);
    load_tile<4>(x + step * kStep, stride_bytes);
    load_tile<6>(columns, kRowBytes);
    load_tile<7>(columns + kHalfValues, kRowBytes);
    if constexpr (TwoTiles) load_tile<5>(x + step * kStep + kTile * stride, stride_bytes);
    multiply_bf16<0, 4, 6>();
    multiply_bf16<1, 4, 7>();
    if constexpr (TwoTiles) {
      multiply_bf16<2, 5, 6>();
      multiply_bf16<3, 5, 7>();
    }
  }
}

template <bool TwoTiles>
void store(int row, int num_rows, const PanelOutput& out) {
  alignas(64) float sums[2 * kTile][kPanel];
  store_tile<0>(&sums[0][0], sizeof sums[0]);
  store_tile<1>(&sums[0][kHalf], sizeof sums[0]);
  if constexpr (TwoTiles) {
    store_tile<2>(&sums[kTile][0], sizeof sums[0]);
    store_tile<3>(&sums[kTile][kHalf], sizeof sums[0]);
  }
  for (int r = 0; r < num_rows; ++r) {
    out.store(row + r, 0, _mm512_load_ps(&sums[r][0]));
    out.store(row + r, 1, _mm512_load_ps(&sums[r][kHalf]));
  }
}

// The first block of rows reads the panel from memory, the others from the cache.
template <bool Prefetch>
void block(const Bf16Rows& x, int row, int num_rows, const bf16* panel, int num_steps,
           const PanelOutput& out) {
  const bf16* data = x.data + row * x.stride;
  if (num_rows > kTile) {
    multiply<true, Prefetch>(data, x.stride, panel, num_steps);
    store<true>(row, num_rows, out);
  } else {
    multiply<false, Prefetch>(data, x.stride, panel, num_steps);
    store<false>(row, num_rows, out);
  }
}

}  // namespace

void gemm_bf16_amx(const Bf16Rows& x, Range rows, const Bf16Weights& weights, Range panels,
                   const OutputRows& out) {
  const int num_steps = ceil_div(weights.k, kStep);
  const std::int64_t panel_values = std::int64_t{num_steps} * kStepValues;
  const int full_end = rows.begin + (rows.end - rows.begin) / (2 * kTile) * (2 * kTile);
  if (rows.begin < full_end) {
    use_shapes(2 * kTile);
    for (int panel = panels.begin; panel < panels.end; ++panel) {
      const bf16* data = weights.data + panel * panel_values;
      const PanelOutput target(out, weights.n, panel);
      block<true>(x, rows.begin, 2 * kTile, data, num_steps, target);
      for (int row = rows.begin + 2 * kTile; row < full_end; row += 2 * kTile)
        block<false>(x, row, 2 * kTile, data, num_steps, target);
    }
  }
  if (full_end < rows.end) {
    use_shapes(rows.end - full_end);
    for (int panel = panels.begin; panel < panels.end; ++panel) {
      const bf16* data = weights.data + panel * panel_values;
      const PanelOutput target(out, weights.n, panel);
      block<true>(x, full_end, rows.end - full_end, data, num_steps, target);
    }
  }
  release_tiles();
}

}  // namespace tokenmill
