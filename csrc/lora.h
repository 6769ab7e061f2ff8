// Low-rank adapters (Hu et al., 2021), several in one batch: out += scale * (x @ A.T) @ B.T, where A
// and B are those of each row's own adapter, and rows without one are not touched.
//
//    shrink    x [rows, k] by A to `rank` values a part and row, scaled
//    expand    those by B, added to out [rows, n]
//
// A layer that merges several projections of one input (q, k and v) has parts: columns of `out` that
// have an A and a B of their own, or none. Rows are taken in tiles of one adapter. Every sum is one
// chain in a fixed order, so a row's bits depend on nothing but itself and its adapter.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_kernels.h"
#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {

// Which rows of a step's flat batch use which adapter; told once a step, read by every layer.
class AdapterRows {
 public:
  static constexpr int kNone = -1;
  static constexpr int kTileRows = 8;

  // Rows order[begin, begin + count) of the batch, all of one slot.
  struct Tile {
    int slot, begin, count;
  };

  // `slot_of_row` [num_rows] keeps its place: for each row of the worker's tables a slot, -1 for no
  // adapter, or less where the adapter could not be had.
  AdapterRows(const std::int32_t* slot_of_row, std::int64_t num_rows, int num_slots);

  // Request i computes counts[i] tokens of row rows[i]; they lie one after another. Throws
  // std::invalid_argument for rows that are none, and those whose adapter could not be had.
  void fill(const std::int64_t* rows, const std::int64_t* counts, std::int64_t num_reqs);

  // No row has an adapter.
  void clear();

  TOKENMILL_INLINE const std::vector<Tile>& tiles() const { return tiles_; }
  TOKENMILL_INLINE const std::vector<int>& order() const { return order_; }
  int num_tokens() const { return num_tokens_; }
  int num_slots() const { return num_slots_; }

 private:
  const std::int32_t* slot_of_row_;
  std::int64_t num_rows_;
  int num_slots_, num_tokens_ = 0;
  std::vector<Tile> tiles_;
  std::vector<int> order_;
  std::vector<std::vector<int>> by_slot_;
};

// The adapters of one layer, by slot. Every buffer keeps its place.
struct AdapterTables {
  static constexpr int kRanks = 4;  // that are summed at once; max_rank is a multiple

  struct Part {
    int first_column, num_columns;
    int first_panel;  // in B

    TOKENMILL_INLINE int num_panels() const { return ceil_div(num_columns, kPanel); }
  };

  int num_slots, max_rank, in_features;
  bool is_bf16;          // else float32
  const char* a;         // [slots, parts, max_rank, in_features]
  const char* b;         // [slots], of which each is, for a part of rank r, [panels, r, 32]
  std::int32_t* ranks;   // [slots, parts]; 0 is no adapter
  const float* scales;   // [slots, parts]
  std::vector<Part> parts;
  int num_panels;  // of all parts

  TOKENMILL_INLINE int num_parts() const { return static_cast<int>(parts.size()); }
  TOKENMILL_INLINE int value_bytes() const { return is_bf16 ? 2 : 4; }
  TOKENMILL_INLINE int rank(int slot, int part) const { return ranks[slot * num_parts() + part]; }
  TOKENMILL_INLINE float scale(int slot, int part) const { return scales[slot * num_parts() + part]; }
  // Row `rank` of a part's A.
  TOKENMILL_INLINE const char* a_row(int slot, int part, int rank) const {
    const std::int64_t row = (std::int64_t{slot} * num_parts() + part) * max_rank + rank;
    return a + row * in_features * value_bytes();
  }
  // A panel of a part's B.
  TOKENMILL_INLINE const char* b_panel(int slot, int part, int panel) const {
    const std::int64_t before = std::int64_t{slot} * num_panels + parts[part].first_panel;
    const std::int64_t values = before * max_rank + std::int64_t{panel} * rank(slot, part);
    return b + values * kPanel * value_bytes();
  }
};

struct AdapterCall {
  const AdapterRows* rows;
  const AdapterTables* tables;
  TokenRows x;              // data may be null
  QuantizedRows quantized;  // then this is read
  float* low;               // [num_rows, parts, max_rank], room for what is between
  TokenRows out;            // [num_rows, n]

  TOKENMILL_INLINE float* low_of(int row, int part) const {
    return low + (std::int64_t{row} * tables->num_parts() + part) * tables->max_rank;
  }
};

// Throws std::invalid_argument if the rows were told for a step of more tokens than `num_rows`.
void add_adapters(const AdapterCall& call, int num_rows);

// ---------------------------------------------------------------------------------------------
// What an instruction set provides: ranks [begin, end) of a part for a tile's rows, and panels
// [begin, end) of a part. The first rank is a multiple of kRanks.

struct AdapterTask {
  AdapterRows::Tile tile;
  int part;
};

#define TOKENMILL_LEVELS(name)                                              \
  void name##_portable(const AdapterCall&, const AdapterTask&, Range range); \
  void name##_avx2(const AdapterCall&, const AdapterTask&, Range range);     \
  void name##_avx512(const AdapterCall&, const AdapterTask&, Range range);
TOKENMILL_LEVELS(shrink_rows)
TOKENMILL_LEVELS(expand_rows)
#undef TOKENMILL_LEVELS

}  // namespace tokenmill
