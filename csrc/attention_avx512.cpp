// Attention with AVX-512.
#include "attention_worker.h"

namespace tokenmill {

void attention_avx512(const AttentionCall& call, const TaskQueue& queue, float* partials) {
  switch (call.shape.cache.format) {
    case KvFormat::bf16:
      VectorWorker<Bf16Words, KvFormat::bf16>(call).run(queue, partials);
      break;
    case KvFormat::int8:
      VectorWorker<CodeWords, KvFormat::int8>(call).run(queue, partials);
      break;
    case KvFormat::float32:
      VectorWorker<FloatWords, KvFormat::float32>(call).run(queue, partials);
      break;
  }
}

void merge_partials_avx512(const AttentionCall& call, const MergeTask& merge,
                           const float* partials) {
  const int size = call.shape.cache.value_size(), num_rows = merge.row_end - merge.row_begin;
  const RowState state = RowState::at(
      static_cast<float*>(thread_scratch(1, partial_floats(size) * sizeof(float))));
  clear_state(state, num_rows, size);
  for (int i = 0; i < merge.num_partials; ++i) {
    const float* partial = partials + (merge.first_partial + i) * partial_floats(size);
    merge_state(state, RowState::at(const_cast<float*>(partial)), num_rows, size,
                exponent_factor(call.shape));
  }
  store_result(call, {merge.request, merge.kv_head, merge.row_begin, num_rows}, state);
}

}  // namespace tokenmill
