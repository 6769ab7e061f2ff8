// AMX tiles in plain code, with the processor's rules: shapes that do not fit end the program, as
// an illegal instruction would. For a build that tests the AMX kernels on a machine without AMX;
// only gemm_tiles.h includes it, and nothing in it is fast.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common.h"

namespace tokenmill {
namespace emulated {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tiles {
  bool in_use = false;
  int rows[kTiles], row_bytes[kTiles];
  alignas(64) std::uint8_t data[kTiles][kRows][kRowBytes];
};

inline thread_local Tiles tiles;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "tokenmill: emulated AMX: %s\n", what);
  std::abort();
}

template <class T>
inline T value_at(int tile, int row, int index) {
  T value;
  std::memcpy(&value, tiles.data[tile][row] + index * sizeof(T), sizeof(T));
  return value;
}

inline void configure(const std::uint8_t* num_rows, const std::uint16_t* row_bytes) {
  for (int tile = 0; tile < kTiles; ++tile) {
    require(num_rows[tile] <= kRows && row_bytes[tile] <= kRowBytes, "a tile is too large");
    tiles.rows[tile] = num_rows[tile];
    tiles.row_bytes[tile] = row_bytes[tile];
  }
  std::memset(tiles.data, 0, sizeof(tiles.data));
  tiles.in_use = true;
}

inline void release() { tiles.in_use = false; }

inline void zero(int tile) {
  require(tiles.in_use && tiles.rows[tile] > 0, "a tile without a shape");
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}

inline void load(int tile, const void* from, std::int64_t stride_bytes) {
  zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(tiles.data[tile][row],
                static_cast<const std::uint8_t*>(from) + row * stride_bytes,
                tiles.row_bytes[tile]);
}

inline void store(int tile, void* to, std::int64_t stride_bytes) {
  require(tiles.in_use && tiles.rows[tile] > 0, "a tile without a shape");
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(static_cast<std::uint8_t*>(to) + row * stride_bytes, tiles.data[tile][row],
                tiles.row_bytes[tile]);
}

// For each value of the accumulator: sum = step(sum, row of `left`, column of `right`, k).
template <class Sum, class Step>
inline void multiply(int accumulator, int left, int right, Step step) {
  require(tiles.in_use && tiles.rows[accumulator] > 0, "a tile without a shape");
  require(tiles.rows[accumulator] == tiles.rows[left], "rows of sums and left factor differ");
  require(tiles.row_bytes[accumulator] == tiles.row_bytes[right],
          "columns of sums and right factor differ");
  require(tiles.row_bytes[left] == 4 * tiles.rows[right], "the factors do not fit");
  for (int row = 0; row < tiles.rows[accumulator]; ++row) {
    for (int column = 0; column < tiles.row_bytes[accumulator] / 4; ++column) {
      Sum sum = value_at<Sum>(accumulator, row, column);
      for (int k = 0; k < tiles.rows[right]; ++k) sum = step(sum, row, column, k);
      std::memcpy(tiles.data[accumulator][row] + column * sizeof(Sum), &sum, sizeof(Sum));
    }
  }
}

inline float bf16_at(int tile, int row, int index) {
  const std::uint32_t bits = std::uint32_t{value_at<std::uint16_t>(tile, row, index)} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void multiply_bf16(int accumulator, int left, int right) {
  multiply<float>(accumulator, left, right, [&](float sum, int row, int column, int k) {
    for (int i = 0; i < 2; ++i)
      sum = __builtin_fmaf(bf16_at(left, row, 2 * k + i), bf16_at(right, k, 2 * column + i), sum);
    return sum;
  });
}

inline void multiply_int8(int accumulator, int left, int right) {
  multiply<std::int32_t>(
      accumulator, left, right, [&](std::int32_t sum, int row, int column, int k) {
        for (int i = 0; i < 4; ++i)
          sum += value_at<std::int8_t>(left, row, 4 * k + i) *
                 value_at<std::int8_t>(right, k, 4 * column + i);
        return sum;
      });
}

}  // namespace emulated
}  // namespace tokenmill
