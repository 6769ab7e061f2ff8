"""How large the KV pool is, and whether one request of the full length fits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.config.argument_types import at_least
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import MemoryLedger
from tokenmill.config.kv_layout import KVLayout
from tokenmill.config.memory import StepShape, format_bytes
from tokenmill.errors import ConfigError, MemoryBudgetError


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool, and what it leaves of the memory."""

    num_blocks: int
    """Of tokens in all layers, the null block included."""
    max_model_len: int
    """The length asked for, or what fits if that was left to us (`max_model_len=-1`)."""
    ledger: MemoryLedger


def size_pool(
    args: EngineArgs,
    step: StepShape,
    layout: KVLayout,
    ledger: MemoryLedger,
    default_fraction: float,
) -> PoolSize:
    """Size the pool from what `ledger` leaves.

    Blocks are counted as if they held their tokens in all layers; where windows let layers share
    memory (`layout`), the same bytes hold more tokens.

    Raises `MemoryBudgetError` with the amount needed, the amount there is, and the nearest setting
    that fits.
    """
    bytes_per_block = layout.bytes_per_whole_block
    num_blocks, setting = _num_blocks(args, step, layout, ledger, default_fraction)
    if num_blocks < 1:
        raise MemoryBudgetError(
            f"{setting} gives the KV cache no block: one takes {format_bytes(bytes_per_block)},"
            f" and the null block one more. Give it at least {2 * bytes_per_block} bytes."
        )
    kv_pool = (num_blocks + 1) * bytes_per_block
    if kv_pool > ledger.left:
        raise MemoryBudgetError(
            f"{setting} needs {format_bytes(kv_pool)} for the KV cache, but"
            f" {format_bytes(ledger.left)} are left; the largest num_kv_blocks that fits is"
            f" {max(ledger.left // bytes_per_block - 1, 0)}."
        )
    num_usable = kv_pool // layout.bytes_per_block - 1
    longest = layout.longest_sequence(num_usable)
    if step.max_model_len > longest and args.max_model_len != -1:
        needed = layout.bytes_needed(step.max_model_len) + layout.bytes_per_block
        raise MemoryBudgetError(
            f"max_model_len={step.max_model_len} needs {format_bytes(needed)} of KV cache, but it"
            f" has {format_bytes(kv_pool)} ({format_bytes(ledger.left)} are left beside the"
            f" weights). The largest max_model_len that fits is {longest}; -1 takes it. Or give"
            f" the cache more with kv_cache_memory_bytes."
        )
    return PoolSize(
        num_blocks=num_blocks + 1,
        max_model_len=longest,
        ledger=replace(ledger, kv_pool=kv_pool, kv_tokens=layout.capacity(num_usable)),
    )


def _num_blocks(
    args: EngineArgs,
    step: StepShape,
    layout: KVLayout,
    ledger: MemoryLedger,
    default_fraction: float,
) -> tuple[int, str]:
    """Blocks beside the null block, and the setting that says so."""
    bytes_per_block, block_size = layout.bytes_per_whole_block, layout.block_size
    if ledger.left <= 0:
        raise MemoryBudgetError(
            f"{format_bytes(ledger.available)} of memory are available, but the weights need"
            f" {format_bytes(ledger.weights)}, a step {format_bytes(ledger.workspace)} and the"
            f" process {format_bytes(ledger.reserve)}. {_remedy(ledger)}, or free"
            f" {format_bytes(-ledger.left)}."
        )
    if args.num_kv_blocks is not None:
        num_blocks = at_least("num_kv_blocks", args.num_kv_blocks, 1)
        return num_blocks, f"num_kv_blocks={num_blocks}"
    if args.kv_cache_memory_bytes is not None:
        num_bytes = at_least("kv_cache_memory_bytes", args.kv_cache_memory_bytes, 1)
        return num_bytes // bytes_per_block - 1, f"kv_cache_memory_bytes={num_bytes}"
    fraction = args.kv_cache_memory_fraction
    if fraction is None:
        fraction = default_fraction
    if not 0 < fraction <= 1:
        raise ConfigError(f"kv_cache_memory_fraction={fraction} must lie in (0, 1].")
    useful = -(-step.max_num_seqs * layout.bytes_needed(step.max_model_len) // bytes_per_block)
    if _ends_in_its_step(args):
        useful = min(useful, -(-step.max_num_batched_tokens // block_size) + step.max_num_seqs)
    share = int(ledger.left * fraction) // bytes_per_block - 1
    return min(share, useful), f"kv_cache_memory_fraction={fraction}"


def _ends_in_its_step(args: EngineArgs) -> bool:
    """Whether every request is computed in one step, and leaves nothing to be found again."""
    return (
        args.runner == "pooling"
        and not args.enable_chunked_prefill
        and not args.enable_prefix_caching
    )


def _remedy(ledger: MemoryLedger) -> str:
    if ledger.workspace > ledger.weights:
        return "Lower max_num_batched_tokens, max_num_seqs or max_model_len"
    return "Use a smaller model or dtype"
