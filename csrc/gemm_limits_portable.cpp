#include "gemm_limits.h"
#include "quad_vectors.h"
#include "repeat.h"

namespace tokenmill {
namespace {

#if defined(__ARM_NEON)
constexpr int kSums = 16;       // with both operands they fit the registers
#define TOKENMILL_VECTOR "w"
#elif defined(__SSE2__)
constexpr int kSums = 12;
#define TOKENMILL_VECTOR "x"
#else
constexpr int kSums = 8;
#define TOKENMILL_VECTOR "m"
#endif
constexpr int kRounds = 20000;  // of kSums products: some hundred microseconds

template <class V>
TOKENMILL_INLINE void use(V& value) {  // the value counts as used, and as made anew
  __asm__ volatile("" : "+" TOKENMILL_VECTOR(value));
}

}  // namespace

void read_bytes_portable(const void* data, std::size_t num_bytes, std::size_t ahead) {
  constexpr int kChains = 8;
  constexpr std::size_t kBytes = sizeof(I32x4), kRound = kChains * kBytes;
  const char* bytes = static_cast<const char*>(data);
  I32x4 sums[kChains] = {};
  for (std::size_t at = 0; at + kRound <= num_bytes; at += kRound) {
    for (std::size_t line = 0; line < kRound; line += kCacheLine)
      __builtin_prefetch(bytes + at + line + ahead);
    repeat<kChains>([&](auto chain) TOKENMILL_INLINE_LAMBDA {
      sums[chain.value] ^= load_as<I32x4>(bytes + at + chain.value * kBytes);
    });
  }
  for (int chain = 1; chain < kChains; ++chain) sums[0] ^= sums[chain];
  use(sums[0]);
}

double multiply_float32_portable(const void* data) {
  const float* values = static_cast<const float*>(data);
  F32x4 a = load_as<F32x4>(values);
  const F32x4 b = load_as<F32x4>(values + 4);
  F32x4 sums[kSums];
  repeat<kSums>([&](auto i) { sums[i.value] = load_as<F32x4>(values + 8 + 4 * i.value); });
  for (int round = 0; round < kRounds; ++round) {
    repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
      use(a);
      sums[i.value] = multiply_add(a, b, sums[i.value]);
    });
  }
  repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA { use(sums[i.value]); });
  return 2.0 * 4 * kSums * kRounds;
}

double multiply_int8_portable(const void* data) {
  const std::int16_t* values = static_cast<const std::int16_t*>(data);
  I16x8 a = load_as<I16x8>(values);
  const I16x8 b = load_as<I16x8>(values + 8);
  I32x4 sums[kSums];
  repeat<kSums>([&](auto i) { sums[i.value] = load_as<I32x4>(values + 16 + 8 * i.value); });
  for (int round = 0; round < kRounds; ++round) {
    repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
      use(a);
      sums[i.value] += multiply_pairs(a, b);
    });
  }
  repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA { use(sums[i.value]); });
  return 2.0 * 8 * kSums * kRounds;
}

}  // namespace tokenmill
