// Block products on any processor, with products of 16 bits. With NEON, products of bytes are added
// in 16 bits: two of signed codes fit, at most 2 * 128 * 127, and all eight of unsigned 4-bit ones.
#include "gemm_blocks_quads.h"

namespace tokenmill {
namespace {

#if defined(__ARM_NEON)

struct Products {
  static constexpr int kMostRows = 4;

  template <int Rows>
  struct Operands {
    explicit Operands(const std::int8_t* x) : codes(x) {}
    const std::int8_t* codes;

    // A quad of a row, twice.
    int8x8_t quad(int row, int number) const {
      std::int32_t word;
      std::memcpy(&word, codes + row * kStep + 4 * number, 4);
      return vreinterpret_s8_s32(vdup_n_s32(word));
    }
  };

  template <Kind K, int Rows>
  static TOKENMILL_INLINE void multiply(const Operands<Rows>& x, const std::uint8_t* codes,
                                        const CodeTable& table, I32x4 (&sums)[Rows]) {
    int16x8_t low[Rows], high[Rows];   // of 16 bits: columns 0 and 1, 2 and 3
    I32x4 wide_low[Rows], wide_high[Rows];
    for (int r = 0; r < Rows; ++r) wide_low[r] = wide_high[r] = I32x4{};
    for_quads<K>(codes, table, [&](auto q, int8x16_t values) TOKENMILL_INLINE_LAMBDA {
      constexpr int kQuadNumber = decltype(q)::value;
      // Quads of 8 bits come in order; those of 4 bits one from either half.
      constexpr bool kIsFirst = K == Kind::unsigned4 ? kQuadNumber == 0
                                : K == Kind::table4  ? kQuadNumber < kQuads / 2
                                                     : kQuadNumber % 2 == 0;
      constexpr bool kIsLast = K == Kind::unsigned4 ? kQuadNumber == kQuads - 1 : !kIsFirst;
      repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
        const int8x8_t quad = x.quad(r.value, kQuadNumber);
        if constexpr (kIsFirst) {
          low[r.value] = vmull_s8(vget_low_s8(values), quad);
          high[r.value] = vmull_s8(vget_high_s8(values), quad);
        } else {
          low[r.value] = vmlal_s8(low[r.value], vget_low_s8(values), quad);
          high[r.value] = vmlal_s8(high[r.value], vget_high_s8(values), quad);
        }
        if constexpr (kIsLast) {
          wide_low[r.value] = vpadalq_s16(wide_low[r.value], low[r.value]);
          wide_high[r.value] = vpadalq_s16(wide_high[r.value], high[r.value]);
        }
      });
    });
    for (int r = 0; r < Rows; ++r) sums[r] = add_neighbours(wide_low[r], wide_high[r]);
  }
};

#else

struct Products {
  static constexpr int kMostRows = 4;

  template <int Rows>
  struct Operands {
    explicit Operands(const std::int8_t* x) {
      for (int r = 0; r < Rows; ++r) {
        for (int i = 0; i < kStep / 16; ++i) {
          const I8x16 codes = load_as<I8x16>(x + r * kStep + 16 * i);
          spread(extend_low(codes), quads[r] + 4 * i);
          spread(extend_high(codes), quads[r] + 4 * i + 2);
        }
      }
    }
    I16x8 quads[Rows][kQuads];  // each quad twice

   private:
    static void spread(I16x8 two, I16x8* quads) {
      quads[0] = bits_as<I16x8>(__builtin_shuffle(bits_as<I64x2>(two), I64x2{0, 0}));
      quads[1] = bits_as<I16x8>(__builtin_shuffle(bits_as<I64x2>(two), I64x2{1, 1}));
    }
  };

  template <Kind K, int Rows>
  static TOKENMILL_INLINE void multiply(const Operands<Rows>& x, const std::uint8_t* codes,
                                        const CodeTable& table, I32x4 (&sums)[Rows]) {
    I32x4 low[Rows], high[Rows];  // two sums a column: of columns 0 and 1, 2 and 3
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA { low[r.value] = high[r.value] = I32x4{}; });
    for_quads<K>(codes, table, [&](auto q, I8x16 values) TOKENMILL_INLINE_LAMBDA {
      // Codes without sign take half of what those with a sign do.
      constexpr bool kIsUnsigned = K == Kind::unsigned4;
      const I16x8 first = kIsUnsigned ? interleave_low(values, I8x16{}) : extend_low(values);
      const I16x8 second = kIsUnsigned ? interleave_high(values, I8x16{}) : extend_high(values);
      repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
        low[r.value] += multiply_pairs(first, x.quads[r.value][q.value]);
        high[r.value] += multiply_pairs(second, x.quads[r.value][q.value]);
      });
    });
    repeat<Rows>([&](auto r) TOKENMILL_INLINE_LAMBDA {
      sums[r.value] = add_neighbours(low[r.value], high[r.value]);
    });
  }
};

#endif

}  // namespace

void gemm_blocks_portable(const QuantizedRows& x, Range rows, const BlockWeights& weights,
                          Range panels, const OutputRows& out) {
  multiply_blocks<Products>(x, rows, weights, panels, out);
}

}  // namespace tokenmill
