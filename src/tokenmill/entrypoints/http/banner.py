"""What a server says when it is ready."""

from __future__ import annotations

import tokenmill
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.memory import format_bytes


def banner(config: EngineConfig, names: tuple[str, ...], address: str, seconds: float) -> str:
    """Model, kernels, memory, capacity, address; several lines."""
    model, ledger, cache = config.model, config.ledger, config.cache
    threads = "1 thread" if config.num_threads == 1 else f"{config.num_threads} threads"
    full = ledger.kv_tokens / model.max_model_len
    rows = {
        "model": f"{', '.join(names)} ({model.dtype}, {config.kernels} kernels, {threads})",
        "memory": (
            f"weights {format_bytes(ledger.weights)}, KV cache {format_bytes(ledger.kv_pool)},"
            f" workspace {format_bytes(ledger.workspace)}, reserve {format_bytes(ledger.reserve)},"
            f" left {format_bytes(ledger.left)} of {format_bytes(ledger.available)}"
        ),
        "context": f"{model.max_model_len:,} tokens",
        "KV cache": f"{ledger.kv_tokens:,} tokens in blocks of {cache.block_size}",
        "concurrency": (
            f"{config.scheduler.max_num_seqs} sequences; {full:.1f} of the full context at once"
        ),
        "address": f"{address} (interface: /docs)",
    }
    if config.data_parallel_size > 1:
        rows = {"replicas": f"{config.data_parallel_size}, each with what follows", **rows}
    lines = [f"tokenmill {tokenmill.__version__} is ready after {seconds:.1f} s"]
    lines += [f"  {name:<12} {text}" for name, text in rows.items()]
    return "\n".join(lines)
