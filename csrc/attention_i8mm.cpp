// Attention on aarch64 with dot products of bf16: a pair of a row times a pair of each column, as
// one product of AVX-512 does. Its matrix products would want two rows at once, which a decode step
// of one head a group has not.
#include "portable_registers.h"

#include "attention_worker.h"

namespace tokenmill {
namespace {

struct Bf16Dots : Bf16Words {
  static TOKENMILL_INLINE Floats add(const Floats& sum, const Integers& columns,
                                     std::int32_t row) {
    const auto pair = (bfloat16x4_t)vdup_n_s32(row);
    const auto added = [pair](F32x4 part, I32x4 pairs) TOKENMILL_INLINE_LAMBDA {
      return (F32x4)vbfdotq_lane_f32((float32x4_t)part, (bfloat16x8_t)pairs, pair, 0);
    };
    return {added(sum.a, columns.a), added(sum.b, columns.b), added(sum.c, columns.c),
            added(sum.d, columns.d)};
  }
};

}  // namespace

void attention_i8mm(const AttentionCall& call, const TaskQueue& queue, float* partials) {
  if (call.shape.cache.format != KvFormat::bf16) return attention_dotprod(call, queue, partials);
  VectorWorker<Bf16Dots, KvFormat::bf16>(call).run(queue, partials);
}

}  // namespace tokenmill
