#include <arm_neon.h>

#include "gemm_limits.h"
#include "repeat.h"

namespace tokenmill {
namespace {

constexpr int kSums = 16;       // enough independent sums to hide the latency
constexpr int kRounds = 20000;  // of kSums products: some hundred microseconds

// Multiplies until all rounds are done; the sums count as used.
template <class Sum, class Multiply>
TOKENMILL_INLINE void run(Sum (&sums)[kSums], const Multiply& multiply) {
  for (int round = 0; round < kRounds; ++round)
    repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
      sums[i.value] = multiply(sums[i.value]);
    });
  repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
    __asm__ volatile("" : : "w"(sums[i.value]));
  });
}

}  // namespace

double multiply_bf16_i8mm(const void* data) {
  const std::uint16_t* values = static_cast<const std::uint16_t*>(data);
  const bfloat16x8_t a = vreinterpretq_bf16_u16(vld1q_u16(values));
  const bfloat16x8_t b = vreinterpretq_bf16_u16(vld1q_u16(values + 8));
  float32x4_t sums[kSums];
  repeat<kSums>([&](auto i) {
    sums[i.value] = vreinterpretq_f32_u16(vld1q_u16(values + 16 + 8 * i.value));
  });
  run(sums, [&](float32x4_t sum) TOKENMILL_INLINE_LAMBDA { return vbfmmlaq_f32(sum, a, b); });
  return 2.0 * 16 * kSums * kRounds;
}

double multiply_int8_i8mm(const void* data) {
  const std::int8_t* values = static_cast<const std::int8_t*>(data);
  const int8x16_t a = vld1q_s8(values), b = vld1q_s8(values + 16);
  int32x4_t sums[kSums];
  repeat<kSums>([&](auto i) {
    sums[i.value] = vreinterpretq_s32_s8(vld1q_s8(values + 32 + 16 * i.value));
  });
  run(sums, [&](int32x4_t sum) TOKENMILL_INLINE_LAMBDA { return vmmlaq_s32(sum, a, b); });
  return 2.0 * 32 * kSums * kRounds;
}

}  // namespace tokenmill
