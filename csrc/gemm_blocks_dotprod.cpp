// Block products with NEON's dot products: a quad of four columns times a quad of a row.
#include "gemm_blocks_quads.h"

namespace tokenmill {
namespace {

struct Products {
  static constexpr int kMostRows = 4;

  template <int Rows>
  struct Operands {
    explicit Operands(const std::int8_t* x) {
      for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < kStep / 16; ++i) codes[r][i] = load_as<I8x16>(x + r * kStep + 16 * i);
    }
    int8x16_t codes[Rows][kStep / 16];
  };

  template <Kind K, int Rows>
  static TOKENMILL_INLINE void multiply(const Operands<Rows>& x, const std::uint8_t* codes,
                                        const CodeTable& table, I32x4 (&sums)[Rows]) {
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA { sums[r.value] = I32x4{}; });
    for_quads<K>(codes, table, [&](auto q, I8x16 values) TOKENMILL_INLINE_LAMBDA {
      constexpr int kQuadNumber = decltype(q)::value;
      repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
        sums[r.value] = vdotq_laneq_s32(sums[r.value], values, x.codes[r.value][kQuadNumber / 4],
                                        kQuadNumber % 4);
      });
    });
  }
};

}  // namespace

void gemm_blocks_dotprod(const QuantizedRows& x, Range rows, const BlockWeights& weights,
                         Range panels, const OutputRows& out) {
  multiply_blocks<Products>(x, rows, weights, panels, out);
}

}  // namespace tokenmill
