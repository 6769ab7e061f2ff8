// Block products with AMX: sixteen rows times half a panel, group by group.
//
// A tile product gives the exact integers of one group, and AVX-512 scales and adds them up; the
// latter is the longer part. So that both run at the same time, the integers of a group go through
// memory, two groups after they were computed, and are read when another group has passed: tiles
// are not renamed, and nothing waits for a product or a store that has just begun.
//
//     tmm0..3    integers of four groups in turn
//     tmm4, 5    16 rows of x, 32 values along K
//     tmm6, 7    codes of the weights, 8 quads x 16 columns
//
// A panel is unpacked once (4-bit codes to 8-bit, scales to float32) and used for all rows.
#include "common.h"
#include "gemm_kernels.h"
#include "gemm_store.h"
#include "gemm_tiles.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kRows = QuantizedGroup::kRows;
constexpr int kFewestRows = 8;  // below this the tiles' fixed cost is higher than AVX-512's work
constexpr int kHalfBytes = kHalf * kStep;  // of 8-bit codes

// Half a panel as the tiles want it.
struct HalfPanel {
  const std::int8_t* codes;
  std::size_t group_stride;  // bytes from one group's codes to the next
  const float* scales;       // [num_groups, 16]
  const float* minimums;     // [num_groups, 16]
  const char* next;          // what will be read from memory next
  int next_lines;            // so many cache lines of it for each group, or 0
};

struct Scratch {
  std::int8_t* codes;   // [num_groups, 2 halves, 8 quads, 16 columns, 4 values]
  float* scales;        // [2 halves, num_groups, 16]
  float* minimums;

  explicit Scratch(int num_groups) {
    const std::size_t code_bytes = std::size_t(num_groups) * 2 * kHalfBytes;
    const std::size_t scale_bytes = std::size_t(num_groups) * kPanel * sizeof(float);
    auto* memory = static_cast<char*>(thread_scratch(0, code_bytes + 2 * scale_bytes));
    codes = reinterpret_cast<std::int8_t*>(memory);
    scales = reinterpret_cast<float*>(memory + code_bytes);
    minimums = reinterpret_cast<float*>(memory + code_bytes + scale_bytes);
  }
};

// What 4-bit codes stand for, in each of the four lanes of a register.
__m512i code_values(const BlockFormat& format) {
  if (format.codes != Codes::linear)
    return _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(code_table(format.codes))));
  const __m512i numbers = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_sub_epi8(numbers, _mm512_set1_epi8(static_cast<char>(format.zero)));
}

void unpack_codes(const std::uint8_t* group, __m512i values, std::int8_t* codes) {
  const __m512i low_mask = _mm512_set1_epi8(0x0f);
  for (int half = 0; half < 2; ++half) {
    for (int quad = 0; quad < kQuads / 2; ++quad) {
      const __m512i both = _mm512_load_si512(group + (half * kQuads / 2 + quad) * 64);
      const __m512i low = _mm512_and_si512(both, low_mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
      std::int8_t* target = codes + half * kHalfBytes + quad * 64;
      _mm512_store_si512(target, _mm512_shuffle_epi8(values, low));
      _mm512_store_si512(target + kHalfBytes / 2, _mm512_shuffle_epi8(values, high));
    }
  }
}

void unpack_scales(const fp16* halves, float* low, float* high) {
  const __m256i* both = reinterpret_cast<const __m256i*>(halves);
  _mm512_store_ps(low, _mm512_cvtph_ps(_mm256_load_si256(both)));
  _mm512_store_ps(high, _mm512_cvtph_ps(_mm256_load_si256(both + 1)));
}

class Panel {
 public:
  Panel(const std::uint8_t* packed, const BlockFormat& format, int num_groups,
        const Scratch& scratch)
      : packed_(packed), format_(format), num_groups_(num_groups), scratch_(scratch) {
    const std::size_t group_bytes = format.group_bytes();
    const __m512i values = code_values(format);
    for (int g = 0; g < num_groups; ++g) {
      const std::uint8_t* group = packed + g * group_bytes;
      if (format.bits == 4) unpack_codes(group, values, scratch.codes + g * 2 * kHalfBytes);
      const fp16* scales = reinterpret_cast<const fp16*>(group + format.code_bytes());
      float* low = scratch.scales + g * kHalf;
      unpack_scales(scales, low, low + num_groups * kHalf);
      if (format.has_minimum) {
        low = scratch.minimums + g * kHalf;
        unpack_scales(scales + kPanel, low, low + num_groups * kHalf);
      }
    }
  }

  // With `prefetch`, each half fetches half of the next panel while it is multiplied.
  HalfPanel half(int half, bool prefetch) const {
    const std::size_t group_bytes = format_.group_bytes();
    const bool unpacked = format_.bits == 4;
    const auto* codes =
        unpacked ? scratch_.codes : reinterpret_cast<const std::int8_t*>(packed_);
    const int lines = ceil_div(static_cast<int>(group_bytes / kCacheLine), 2);
    const std::uint8_t* next = packed_ + num_groups_ * group_bytes;
    return {codes + half * kHalfBytes,
            unpacked ? 2 * kHalfBytes : group_bytes,
            scratch_.scales + half * num_groups_ * kHalf,
            scratch_.minimums + half * num_groups_ * kHalf,
            reinterpret_cast<const char*>(next) + half * num_groups_ * lines * kCacheLine,
            prefetch ? lines : 0};
  }

 private:
  const std::uint8_t* packed_;
  const BlockFormat& format_;
  int num_groups_;
  const Scratch& scratch_;
};

void use_shapes(int num_rows) {
  TileShapes shapes;
  for (int integers = 0; integers < 4; ++integers) shapes.set(integers, num_rows, 64);
  shapes.set(4, num_rows, kStep);
  shapes.set(5, num_rows, kStep);
  shapes.set(6, kQuads, 64);
  shapes.set(7, kQuads, 64);
  shapes.use();
}

struct alignas(64) Integers {
  std::int32_t values[kRows][kHalf];
};

template <int Tile>
TOKENMILL_INLINE void multiply_group(const QuantizedGroup& x, const std::int8_t* codes) {
  constexpr int kX = 4 + Tile % 2, kCodes = 6 + Tile % 2;
  stream_tile<kX>(x.codes, kStep);
  load_tile<kCodes>(codes, 64);
  zero_tile<Tile>();
  multiply_int8<Tile, kX, kCodes>();
}

template <int Rows, bool HasMinimum>
TOKENMILL_INLINE void add_group(const Integers& integers, const float* scales, const float* minimums,
                      const QuantizedGroup& x, __m512 (&sums)[Rows]) {
  const __m512 scale = _mm512_load_ps(scales);
  const __m512 minimum = HasMinimum ? _mm512_load_ps(minimums) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const __m512 exact = _mm512_cvtepi32_ps(_mm512_load_si512(integers.values[r]));
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[r]));
    sums[r] = _mm512_fmadd_ps(exact, both, sums[r]);
    if constexpr (HasMinimum)
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.scaled_sums[r]), sums[r]);
  }
}

constexpr int kStoreLag = 2, kAddLag = 3;

// Multiplies group g, stores the integers of an earlier one, adds those of a still earlier one.
template <int Tile, bool HasMinimum, int Rows>
TOKENMILL_INLINE void stage(int g, int num_groups, const QuantizedGroup* x, const HalfPanel& panel,
                            Integers (&integers)[4], __m512 (&sums)[Rows]) {
  constexpr int kStored = (Tile + 4 - kStoreLag) % 4, kAdded = (Tile + 4 - kAddLag) % 4;
  const int stored = g - kStoreLag, added = g - kAddLag;
  if (g < num_groups) {
    for (int line = 0; line < panel.next_lines; ++line)
      _mm_prefetch(panel.next + (g * panel.next_lines + line) * kCacheLine, _MM_HINT_T0);
    multiply_group<Tile>(x[g], panel.codes + g * panel.group_stride);
  }
  if (stored >= 0 && stored < num_groups) store_tile<kStored>(integers[kStored].values, 64);
  if (added >= 0 && added < num_groups)
    add_group<Rows, HasMinimum>(integers[kAdded], panel.scales + added * kHalf,
                                panel.minimums + added * kHalf, x[added], sums);
}

// Rows of one block times half a panel.
template <int Rows, bool HasMinimum>
void multiply_half(const QuantizedGroup* x, int num_groups, const HalfPanel panel, int row,
                   int half, const PanelOutput& out) {
  Integers integers[4];
  __m512 sums[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
  for (int g = 0; g < num_groups + kAddLag; g += 4) {
    stage<0, HasMinimum>(g, num_groups, x, panel, integers, sums);
    stage<1, HasMinimum>(g + 1, num_groups, x, panel, integers, sums);
    stage<2, HasMinimum>(g + 2, num_groups, x, panel, integers, sums);
    stage<3, HasMinimum>(g + 3, num_groups, x, panel, integers, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) out.store(row + r, half, sums[r]);
}

// Finds the product for `num_rows` rows, kFewestRows to Rows.
template <int Rows, bool HasMinimum>
void multiply_rows(int num_rows, const QuantizedRows& x, int row, const Panel& panel,
                   bool prefetch, const PanelOutput& out) {
  if constexpr (Rows >= kFewestRows) {
    if (num_rows < Rows)
      return multiply_rows<Rows - 1, HasMinimum>(num_rows, x, row, panel, prefetch, out);
    for (int half = 0; half < 2; ++half)
      multiply_half<Rows, HasMinimum>(x.block_of(row), x.num_groups, panel.half(half, prefetch),
                                      row, half, out);
  }
}

template <bool HasMinimum>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const std::size_t panel_bytes = x.num_groups * weights.format.group_bytes();
  const Scratch scratch(x.num_groups);
  int shape = 0;
  for (int p = panels.begin; p < panels.end; ++p) {
    const Panel panel(weights.data + p * panel_bytes, weights.format, x.num_groups, scratch);
    const PanelOutput target(out, weights.n, p);
    for (int row = rows.begin; row < rows.end; row += kRows) {
      const int num_rows = min_of(kRows, rows.end - row);
      if (num_rows != shape) use_shapes(shape = num_rows);
      multiply_rows<kRows, HasMinimum>(num_rows, x, row, panel, row == rows.begin, target);
    }
  }
  release_tiles();
}

}  // namespace

void gemm_blocks_amx(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  // The last few rows are the other kernel's: the bits are the same.
  const int tail = (rows.end - rows.begin) % kRows;
  const int end = tail < kFewestRows ? rows.end - tail : rows.end;
  if (rows.begin < end) {
    const Range tiled{rows.begin, end};
    weights.format.has_minimum ? multiply_panels<true>(x, tiled, weights, panels, out)
                               : multiply_panels<false>(x, tiled, weights, panels, out);
  }
  if (end < rows.end) gemm_blocks_avx512(x, {end, rows.end}, weights, panels, out);
}

}  // namespace tokenmill
