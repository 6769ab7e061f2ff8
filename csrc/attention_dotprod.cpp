// Attention on aarch64 with dot products of bytes, for int8 caches; others have none to gain.
#include "portable_registers.h"

#include "attention_quads.h"
#include "attention_worker.h"

namespace tokenmill {

void attention_dotprod(const AttentionCall& call, const TaskQueue& queue, float* partials) {
  if (call.shape.cache.format != KvFormat::int8) return attention_portable(call, queue, partials);
  VectorWorker<CodeQuads, KvFormat::int8>(call).run(queue, partials);
}

}  // namespace tokenmill
