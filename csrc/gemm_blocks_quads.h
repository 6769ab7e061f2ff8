// Block products on vectors of 128 bits: a few rows times a panel, group by group. How the codes of
// a group are multiplied is up to `Products`, which has
//   kMostRows                      rows at once; divides QuantizedGroup::kRows
//   Operands<Rows>(x)              codes of rows that lie kStep apart, made ready for a group
//   multiply<K>(x, codes, table, sums)
//                                  exact sums of four columns for each row. The first quads of the
//                                  four columns are at `codes`, the next ones 64 bytes on
// All else is AVX-512's arithmetic in the same order, so the bits are the same.
#pragma once

#include "gemm_block_formats.h"
#include "gemm_store_quads.h"
#include "repeat.h"

namespace tokenmill {
namespace {

constexpr int kQuadBytes = 4 * kHalf;  // from a quad of 16 columns to the next
constexpr std::int64_t kAhead = 1024;  // bytes that the prefetch runs ahead

// What 4-bit codes stand for, sixteen at a time.
class CodeTable {
 public:
#if defined(__ARM_NEON)
  explicit CodeTable(const std::int8_t* values) : values_(load_as<I8x16>(values)) {}

  I8x16 operator()(U8x16 codes) const { return vqtbl1q_s8(values_, codes); }

 private:
  int8x16_t values_;
#else
  explicit CodeTable(const std::int8_t* values) {
    for (int i = 0; i < 8; ++i) {
      even_[i] = I8x16{} + values[2 * i];
      change_[i] = I8x16{} + static_cast<std::int8_t>(values[2 * i] ^ values[2 * i + 1]);
    }
  }

  // Bit by bit, the lowest one first: each halves the values that are left.
  I8x16 operator()(U8x16 codes) const {
    I8x16 left[8];
    const I8x16 odd = has_bit(codes, 1);
    for (int i = 0; i < 8; ++i) left[i] = even_[i] ^ (odd & change_[i]);
    for (int count = 4, bit = 2; count > 0; count /= 2, bit *= 2) {
      const I8x16 is_set = has_bit(codes, bit);
      for (int i = 0; i < count; ++i)
        left[i] = left[2 * i] ^ (is_set & (left[2 * i] ^ left[2 * i + 1]));
    }
    return left[0];
  }

 private:
  static I8x16 has_bit(U8x16 codes, int bit) {
    const U8x16 wanted = U8x16{} + static_cast<std::uint8_t>(bit);
    return (codes & wanted) == wanted;
  }

  I8x16 even_[8], change_[8];  // of two neighbours the first, and where they differ
#endif
};

struct Columns {
  const std::uint8_t* codes;  // of the panel's group
  const CodeTable& table;     // for codes that have one
  int zero;
};

template <class Products, class F, int Rows>
TOKENMILL_INLINE void add_group(const QuantizedGroup& x, int first, const Columns& group,
                                F32x4 (&sums)[kParts][Rows]) {
  const typename Products::template Operands<Rows> operands(x.codes[first]);
  const auto* scales = reinterpret_cast<const fp16*>(group.codes + 2 * F::kHalfBytes);
  for (int part = 0; part < kParts; ++part) {
    constexpr int kHalfParts = kParts / 2;
    const std::uint8_t* codes =
        group.codes + part / kHalfParts * F::kHalfBytes + part % kHalfParts * sizeof(I32x4);
    I32x4 exact[Rows];
    Products::template multiply<F::kKind>(operands, codes, group.table, exact);
    const F32x4 scale = floats_of_halves(scales + part * kQuad);
    F32x4 values[Rows], factors[Rows];
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
      I32x4 sum = exact[r.value];
      if constexpr (F::kKind == Kind::unsigned4 && !F::kHasMinimum)
        sum -= splat(group.zero * x.sums[first + r.value]);
      values[r.value] = to_floats(sum);
      factors[r.value] = scale * splat(x.scales[first + r.value]);
    });
    add_products_once(values, factors, sums[part]);
    if constexpr (F::kHasMinimum) {
      const F32x4 minimum = floats_of_halves(scales + kPanel + part * kQuad);
      repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
        values[r.value] = minimum;
        factors[r.value] = splat(x.scaled_sums[first + r.value]);
      });
      add_products_once(values, factors, sums[part]);
    }
  }
}

template <class Products, class F, int Rows = Products::kMostRows>
void multiply_tile(int num_rows, const QuantizedRows& x, int row, Columns columns,
                   const PanelOutputQuads& out) {
  if constexpr (Rows > 1) {
    if (num_rows < Rows)
      return multiply_tile<Products, F, Rows - 1>(num_rows, x, row, columns, out);
  }
  const QuantizedGroup* x_groups = x.block_of(row);
  F32x4 sums[kParts][Rows];
  for (auto& part : sums)
    for (F32x4& sum : part) sum = F32x4{};
  for (int g = 0; g < x.num_groups; ++g, columns.codes += F::kGroupBytes) {
    for (std::size_t line = 0; line < F::kGroupBytes; line += kCacheLine)
      __builtin_prefetch(reinterpret_cast<const char*>(columns.codes) + kAhead + line);
    add_group<Products, F, Rows>(x_groups[g], row % QuantizedGroup::kRows, columns, sums);
  }
  for (int r = 0; r < Rows; ++r)
    for (int part = 0; part < kParts; ++part) out.store(row + r, part, sums[part][r]);
}

template <class Products, class F>
void multiply_panels(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  const std::size_t panel_bytes = x.num_groups * F::kGroupBytes;
  const CodeTable table(code_table(weights.format.codes));
  for (int p = panels.begin; p < panels.end; ++p) {
    const PanelOutputQuads target(out, weights.n, p);
    const Columns columns{weights.data + p * panel_bytes, table, weights.format.zero};
    for (int row = rows.begin; row < rows.end; row += Products::kMostRows)
      multiply_tile<Products, F>(min_of(rows.end - row, Products::kMostRows), x, row, columns,
                                 target);
  }
}

template <class Products>
void multiply_blocks(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                     const OutputRows& out) {
  static_assert(QuantizedGroup::kRows % Products::kMostRows == 0, "a tile lies in one block");
  with_format(weights.format, [&](auto format) {
    multiply_panels<Products, decltype(format)>(x, rows, weights, panels, out);
  });
}

// ---- Codes in registers ------------------------------------------------------------------------

// body(number of a quad, its codes of four columns) for each quad of a group.
template <Kind K, class F>
TOKENMILL_INLINE void for_quads(const std::uint8_t* codes, const CodeTable& table,
                                const F& body) {
  if constexpr (K == Kind::signed8) {
    repeat<kQuads>([&](auto q) TOKENMILL_INLINE_LAMBDA {
      body(q, load_as<I8x16>(codes + q.value * kQuadBytes));
    });
  } else {
    const auto decoded = [&](U8x16 values) TOKENMILL_INLINE_LAMBDA {
      return K == Kind::table4 ? table(values) : bits_as<I8x16>(values);
    };
    repeat<kQuads / 2>([&](auto q) TOKENMILL_INLINE_LAMBDA {
      const U8x16 both = load_as<U8x16>(codes + q.value * kQuadBytes);
      body(q, decoded(both & 0x0f));
      body(Number<q.value + kQuads / 2>{}, decoded(both >> 4));
    });
  }
}

}  // namespace
}  // namespace tokenmill
