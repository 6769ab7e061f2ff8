// Attention and cache writes as a whole: choose the instruction set, split the work.
#include "attention_plan.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

AttentionKernel choose(KvFormat format) {
  const AttentionKernel tiles = format == KvFormat::float32 ? attention_avx512 : attention_amx;
  return at_level(attention_avx2, attention_avx512, tiles);
}

}  // namespace

void attention(AttentionCall call, AttentionPlan& plan) {
  call.tables = plan.tables();
  const AttentionKernel kernel = choose(call.shape.cache.format);
  const auto merge = at_level(merge_partials_avx2, merge_partials_avx512);
  const auto& tasks = plan.tasks();
  const auto& merges = plan.merges();
  float* partials = plan.partials();
  const int num_tasks = static_cast<int>(tasks.size()), threads = num_threads();
  parallel_for(num_tasks, [&](int task, int) {
    kernel(call, {tasks.data(), num_tasks, task, threads}, partials);
  });
  parallel_for(static_cast<int>(merges.size()),
               [&](int task, int) { merge(call, merges[task], partials); });
}

void write_kv(const KvWrite& call) {
  const auto kernel = at_level(write_kv_avx2, write_kv_avx512);
  constexpr int kTaskTokens = 8;
  parallel_for(ceil_div(call.num_tokens, kTaskTokens), [&](int task, int) {
    const int token = task * kTaskTokens;
    kernel(call, token, min_of(token + kTaskTokens, call.num_tokens));
  });
}

}  // namespace tokenmill
