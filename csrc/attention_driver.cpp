// Attention and cache writes as a whole: choose the instruction set, split the work.
#include "attention_plan.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

AttentionKernel choose(KvFormat format) {
  if (format == KvFormat::float32) return TOKENMILL_AT_LEVEL(attention);
  return at_level(TOKENMILL_KERNELS(AttentionKernel, attention, amx, dotprod, i8mm));
}

}  // namespace

void attention(AttentionCall call, AttentionPlan& plan) {
  call.tables = plan.tables();
  const AttentionKernel kernel = choose(call.shape.cache.format);
  const auto merge = TOKENMILL_AT_LEVEL(merge_partials);
  const auto& tasks = plan.tasks();
  const auto& merges = plan.merges();
  float* partials = plan.partials();
  const int num_tasks = static_cast<int>(tasks.size());
  parallel_for(num_tasks, [&](int task, int) {
    kernel(call, {tasks.data(), num_tasks, task, 1}, partials);
  });
  parallel_for(static_cast<int>(merges.size()),
               [&](int task, int) { merge(call, merges[task], partials); });
}

void write_kv(const KvWrite& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(write_kv);
  constexpr int kTaskTokens = 8;
  parallel_for(ceil_div(call.num_tokens, kTaskTokens), [&](int task, int) {
    const int token = task * kTaskTokens;
    kernel(call, token, min_of(token + kTaskTokens, call.num_tokens));
  });
}

}  // namespace tokenmill
