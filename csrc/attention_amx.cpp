// Attention products with AMX: bf16 tiles of up to 16 rows, accumulated in tiles 0 to 3.
//
//   one tile of rows    4 tiles of columns at once, rows in tile 4
//   two tiles of rows   2 tiles of columns at once, rows in tiles 4 and 5
//   columns pass through tiles 6 and 7
#include "attention_rows.h"
#include "gemm_tiles.h"

namespace tokenmill {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileColumns = 16;
constexpr int kTileValues = 512;  // of a full tile of K or V
constexpr int kLower = 2;         // the first accumulator of the lower rows, if there are any

// Tiles for products that add up `step` values at a time.
void use_shapes(int num_rows, int step) {
  TileShapes shapes;
  const int upper = min_of(num_rows, kTileRows), lower = num_rows - upper;
  for (int tile = 0; tile < 4; ++tile)
    shapes.set(tile, lower > 0 && tile >= kLower ? lower : upper, kTileColumns * sizeof(float));
  shapes.set(4, upper, step * sizeof(bf16));
  shapes.set(5, lower > 0 ? lower : upper, step * sizeof(bf16));
  shapes.set(6, step / 2, kTileColumns * 2 * sizeof(bf16));
  shapes.set(7, step / 2, kTileColumns * 2 * sizeof(bf16));
  shapes.use();
}

template <int RowTiles, int Column>
inline void multiply_column(const bf16* tile) {
  constexpr int kTile = 6 + Column % 2;
  load_tile<kTile>(tile, kTileColumns * 2 * sizeof(bf16));
  multiply_bf16<Column, 4, kTile>();
  if constexpr (RowTiles == 2) multiply_bf16<kLower + Column, 5, kTile>();
}

template <int RowTiles, int Column>
inline void store_column(float* out, std::int64_t stride) {
  store_tile<Column>(out + Column * kTileColumns, stride * sizeof(float));
  if constexpr (RowTiles == 2)
    store_tile<kLower + Column>(out + kTileRows * stride + Column * kTileColumns,
                                 stride * sizeof(float));
}

// out = rows . columns for `Columns` tiles of columns; column_tile(step, column) finds them.
template <int RowTiles, int Columns, class ColumnTile>
inline void multiply(const bf16* rows, std::int64_t row_stride, int step_values, int num_steps,
                     const ColumnTile& column_tile, float* out, std::int64_t out_stride) {
  static_assert(RowTiles * Columns <= 4);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int step = 0; step < num_steps; ++step) {
    load_tile<4>(rows + step * step_values, row_stride * sizeof(bf16));
    if constexpr (RowTiles == 2)
      load_tile<5>(rows + step * step_values + kTileRows * row_stride, row_stride * sizeof(bf16));
    multiply_column<RowTiles, 0>(column_tile(step, 0));
    if constexpr (Columns > 1) multiply_column<RowTiles, 1>(column_tile(step, 1));
    if constexpr (Columns > 2) {
      multiply_column<RowTiles, 2>(column_tile(step, 2));
      multiply_column<RowTiles, 3>(column_tile(step, 3));
    }
  }
  store_column<RowTiles, 0>(out, out_stride);
  if constexpr (Columns > 1) store_column<RowTiles, 1>(out, out_stride);
  if constexpr (Columns > 2) {
    store_column<RowTiles, 2>(out, out_stride);
    store_column<RowTiles, 3>(out, out_stride);
  }
}

struct AmxEngine {
  using Value = bf16;
  static constexpr int kStep = 32;

  static void begin(int num_rows, int) { use_shapes(num_rows, kStep); }
  static void end() { release_tiles(); }

  static void scores(const bf16* q, int num_rows, int head_size, const bf16* const* keys,
                     int num_groups, float* scores) {
    if (head_size % kStep == 0) {
      score_tiles(q, num_rows, head_size, kStep, keys, num_groups, scores);
    } else {
      use_shapes(num_rows, kStep / 2);
      score_tiles(q, num_rows, head_size, kStep / 2, keys, num_groups, scores);
      use_shapes(num_rows, kStep);
    }
  }

  static void score_tiles(const bf16* q, int num_rows, int head_size, int step,
                          const bf16* const* keys, int num_groups, float* scores) {
    const int num_steps = head_size / step, tile_values = step * kTileColumns;
    int tile = 0;
    const auto at = [&](int step, int column) { return keys[tile + column] + step * tile_values; };
    const auto columns = [&](auto row_tiles, auto count) {
      constexpr int kRows = decltype(row_tiles)::value, kCount = decltype(count)::value;
      multiply<kRows, kCount>(q, head_size, step, num_steps, at, scores + tile * kTileColumns,
                              kScoreStride);
      tile += kCount;
    };
    if (num_rows > kTileRows) {
      while (tile < 2 * num_groups) columns(Number<2>{}, Number<2>{});
    } else {
      while (tile + 4 <= 2 * num_groups) columns(Number<1>{}, Number<4>{});
      if (tile < 2 * num_groups) columns(Number<1>{}, Number<2>{});
    }
  }

  static void weighted(const bf16* p, int num_rows, int head_size, const bf16* const* values,
                       int num_groups, float* out) {
    const int num_tiles = head_size / kTileColumns;
    constexpr std::int64_t kStride = kScoreStride * sizeof(float) / sizeof(bf16);
    int tile = 0;
    const auto at = [&](int step, int column) {
      return values[step] + (tile + column) * kTileValues;
    };
    const auto columns = [&](auto row_tiles, auto count) {
      constexpr int kRows = decltype(row_tiles)::value, kCount = decltype(count)::value;
      multiply<kRows, kCount>(p, kStride, kStep, num_groups, at, out + tile * kTileColumns,
                              head_size);
      tile += kCount;
    };
    if (num_rows > kTileRows) {
      while (tile + 2 <= num_tiles) columns(Number<2>{}, Number<2>{});
      if (tile < num_tiles) columns(Number<2>{}, Number<1>{});
    } else {
      while (tile + 4 <= num_tiles) columns(Number<1>{}, Number<4>{});
      while (tile + 2 <= num_tiles) columns(Number<1>{}, Number<2>{});
      if (tile < num_tiles) columns(Number<1>{}, Number<1>{});
    }
  }

 private:
  template <int N>
  struct Number {
    static constexpr int value = N;
  };
};

}  // namespace

void attention_amx(const AttentionCall& call, const AttentionTask& task, float* partials) {
  if (call.shape.cache.format == KvFormat::int8) {
    BlockWorker<AmxEngine, KvFormat::int8>(call).run(task, partials);
  } else {
    BlockWorker<AmxEngine, KvFormat::bf16>(call).run(task, partials);
  }
}

}  // namespace tokenmill
