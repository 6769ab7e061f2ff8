// Block products with NEON's matrix products of bytes: two rows times two columns, eight values of
// each. The quads of two columns that follow each other along K are brought together for that.
#include "gemm_blocks_quads.h"

namespace tokenmill {
namespace {

constexpr int kEights = kStep / 8;

struct Products {
  static constexpr int kMostRows = 8;

  template <int Rows>
  struct Operands {
    static constexpr int kPairs = ceil_div(Rows, 2);

    // The last of an odd number of rows is taken twice.
    explicit Operands(const std::int8_t* x) {
      for (int pair = 0; pair < kPairs; ++pair) {
        const std::int8_t* first = x + 2 * pair * kStep;
        const std::int8_t* second = 2 * pair + 1 < Rows ? first + kStep : first;
        for (int i = 0; i < kEights; ++i)
          codes[pair][i] = vcombine_s8(vld1_s8(first + 8 * i), vld1_s8(second + 8 * i));
      }
    }
    int8x16_t codes[kPairs][kEights];
  };

  template <Kind K, int Rows>
  static TOKENMILL_INLINE void multiply(const Operands<Rows>& x, const std::uint8_t* codes,
                                        const CodeTable& table, I32x4 (&sums)[Rows]) {
    constexpr int kPairs = Operands<Rows>::kPairs;
    I8x16 quads[kQuads];
    for_quads<K>(codes, table, [&](auto q, I8x16 values) TOKENMILL_INLINE_LAMBDA {
      quads[q.value] = values;
    });
    int32x4_t low[kPairs], high[kPairs];  // columns 0 and 1 of a row, then of the next; 2 and 3
    repeat<kPairs>([&](auto p) TOKENMILL_INLINE_LAMBDA { low[p.value] = high[p.value] = I32x4{}; });
    repeat<kEights>([&](auto i) TOKENMILL_INLINE_LAMBDA {
      const I32x4 first = bits_as<I32x4>(quads[2 * i.value]);
      const I32x4 second = bits_as<I32x4>(quads[2 * i.value + 1]);
      const I8x16 two = bits_as<I8x16>(I32x4(vzip1q_s32(first, second)));
      const I8x16 others = bits_as<I8x16>(I32x4(vzip2q_s32(first, second)));
      repeat<kPairs>([&](auto p) TOKENMILL_INLINE_LAMBDA {
        low[p.value] = vmmlaq_s32(low[p.value], x.codes[p.value][i.value], two);
        high[p.value] = vmmlaq_s32(high[p.value], x.codes[p.value][i.value], others);
      });
    });
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
      constexpr int kPair = decltype(r)::value / 2;
      sums[r.value] = r.value % 2 == 0
                          ? vcombine_s32(vget_low_s32(low[kPair]), vget_low_s32(high[kPair]))
                          : vcombine_s32(vget_high_s32(low[kPair]), vget_high_s32(high[kPair]));
    });
  }
};

}  // namespace

void gemm_blocks_i8mm(const QuantizedRows& x, Range rows, const BlockWeights& weights, Range panels,
                      const OutputRows& out) {
  multiply_blocks<Products>(x, rows, weights, panels, out);
}

}  // namespace tokenmill
