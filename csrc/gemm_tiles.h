// AMX tiles as plain functions. For files compiled with AMX only.
//
// The compiler's own wrappers do not say that they read memory; these do.
#pragma once

#include <cstdint>

#include "common.h"
#ifdef TOKENMILL_EMULATED_TILES
#include "gemm_tiles_emulated.h"
#endif

namespace tokenmill {

// Rows and bytes per row of each of the eight tiles.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = static_cast<std::uint8_t>(num_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(num_row_bytes);
  }
#ifdef TOKENMILL_EMULATED_TILES
  void use() const { emulated::configure(rows, row_bytes); }
#else
  void use() const { __asm__ volatile("ldtilecfg %0" : : "m"(*this) : "memory"); }
#endif
};
static_assert(sizeof(TileShapes) == 64, "the layout is the processor's");

#ifdef TOKENMILL_EMULATED_TILES

static inline void release_tiles() { emulated::release(); }

template <int Tile>
static inline void zero_tile() {
  emulated::zero(Tile);
}

template <int Tile>
static inline void load_tile(const void* data, std::int64_t stride_bytes) {
  emulated::load(Tile, data, stride_bytes);
}

template <int Tile>
static inline void stream_tile(const void* data, std::int64_t stride_bytes) {
  emulated::load(Tile, data, stride_bytes);
}

template <int Tile>
static inline void store_tile(void* data, std::int64_t stride_bytes) {
  emulated::store(Tile, data, stride_bytes);
}

template <int Accumulator, int Rows, int Columns>
static inline void multiply_bf16() {
  emulated::multiply_bf16(Accumulator, Rows, Columns);
}

template <int Accumulator, int Rows, int Columns>
static inline void multiply_int8() {
  emulated::multiply_int8(Accumulator, Rows, Columns);
}

#else

static inline void release_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int Tile>
static inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
static inline void load_tile(const void* data, std::int64_t stride_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   : : "r"(data), "r"(stride_bytes), "i"(Tile) : "memory");
}

// The same for data that is used once before it would be evicted: it leaves the first-level cache
// to the other operand. In a product whose columns fit there this saves a quarter of the time.
template <int Tile>
static inline void stream_tile(const void* data, std::int64_t stride_bytes) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                   : : "r"(data), "r"(stride_bytes), "i"(Tile) : "memory");
}

template <int Tile>
static inline void store_tile(void* data, std::int64_t stride_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   : : "r"(data), "r"(stride_bytes), "i"(Tile) : "memory");
}

// Accumulator += rows @ columns.
template <int Accumulator, int Rows, int Columns>
static inline void multiply_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   : : "i"(Accumulator), "i"(Rows), "i"(Columns));
}

template <int Accumulator, int Rows, int Columns>
static inline void multiply_int8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   : : "i"(Accumulator), "i"(Rows), "i"(Columns));
}

#endif

}  // namespace tokenmill
