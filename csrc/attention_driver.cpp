// Attention and cache writes as a whole: choose the instruction set, split the work.
#include <stdexcept>

#include "attention_plan.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

AttentionKernel choose(KvFormat format) {
  switch (active_isa()) {
    case Isa::amx: return format == KvFormat::float32 ? attention_avx512 : attention_amx;
    case Isa::avx512: return attention_avx512;
    default: throw std::runtime_error("the native kernels need AVX-512 with VNNI and BF16");
  }
}

}  // namespace

void attention(AttentionCall call, AttentionPlan& plan) {
  call.tables = plan.tables();
  const AttentionKernel kernel = choose(call.shape.cache.format);
  const auto& tasks = plan.tasks();
  const auto& merges = plan.merges();
  float* partials = plan.partials();
  const int num_tasks = static_cast<int>(tasks.size()), threads = num_threads();
  parallel_for(num_tasks, [&](int task, int) {
    kernel(call, {tasks.data(), num_tasks, task, threads}, partials);
  });
  parallel_for(static_cast<int>(merges.size()),
               [&](int task, int) { merge_partials_avx512(call, merges[task], partials); });
}

void write_kv(const KvWrite& call) {
  if (active_isa() == Isa::reference)
    throw std::runtime_error("the native kernels need AVX-512 with VNNI and BF16");
  constexpr int kTaskTokens = 8;
  parallel_for(ceil_div(call.num_tokens, kTaskTokens), [&](int task, int) {
    const int token = task * kTaskTokens;
    write_kv_avx512(call, token, min_of(token + kTaskTokens, call.num_tokens));
  });
}

}  // namespace tokenmill
