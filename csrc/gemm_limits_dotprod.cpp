#include <arm_neon.h>

#include "gemm_limits.h"
#include "repeat.h"

namespace tokenmill {
namespace {

constexpr int kSums = 16;       // enough independent sums to hide the latency
constexpr int kRounds = 20000;  // of kSums products: some hundred microseconds

}  // namespace

double multiply_int8_dotprod(const void* data) {
  const std::int8_t* values = static_cast<const std::int8_t*>(data);
  const int8x16_t a = vld1q_s8(values), b = vld1q_s8(values + 16);
  int32x4_t sums[kSums];
  repeat<kSums>([&](auto i) {
    sums[i.value] = vreinterpretq_s32_s8(vld1q_s8(values + 32 + 16 * i.value));
  });
  for (int round = 0; round < kRounds; ++round) {
    repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
      sums[i.value] = vdotq_s32(sums[i.value], a, b);
    });
  }
  repeat<kSums>([&](auto i) TOKENMILL_INLINE_LAMBDA {
    __asm__ volatile("" : : "w"(sums[i.value]));  // the sums count as used
  });
  return 2.0 * 16 * kSums * kRounds;
}

}  // namespace tokenmill
