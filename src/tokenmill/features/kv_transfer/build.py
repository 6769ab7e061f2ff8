"""What a worker gets to move KV with, from the settings."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.errors import ConfigError
from tokenmill.features.kv_transfer.disk import DiskStore
from tokenmill.features.kv_transfer.identity import hash_root
from tokenmill.features.kv_transfer.memory import MemoryStore
from tokenmill.features.kv_transfer.pool_blocks import LayerBlocks, PoolBlocks
from tokenmill.features.kv_transfer.transfer import (
    BlockStore,
    BlockTransfer,
    Finished,
    Holder,
    Source,
)
from tokenmill.layers.state_space import state_layers
from tokenmill.models.base import CausalLM

logger = logging.getLogger(__name__)


def build_kv_transfer(
    config: EngineConfig, model: CausalLM, cache: KVCacheConfig, checkpoint: Checkpoint
) -> BlockTransfer | None:
    """For a model whose layers are bound to `cache`; None where nothing was asked for.

    Raises `ConfigError` for a directory or an address that cannot be used.
    """
    settings = config.kv_transfer
    if settings is None:
        return None
    pool, shapes = _pool_blocks(model, cache)
    layout = {"block_size": cache.block_size, "layers": shapes}
    root = hash_root(config, checkpoint, layout, settings.secret)
    stores: list[BlockStore] = []
    if settings.memory_bytes:
        stores.append(MemoryStore(settings.memory_bytes))
    if settings.directory is not None:
        directory = Path(settings.directory)
        stores.append(DiskStore(directory, root, settings.disk_bytes, settings.secret))
    finished = Finished()
    source, holder = _peers(settings, root, pool, finished)
    logger.info("KV transfer: %s", _words(settings))
    return BlockTransfer(
        root,
        pool,
        stores,
        finished,
        source=source,
        holder=holder,
        fails_requests=settings.fails_requests,
    )


def _pool_blocks(model: CausalLM, cache: KVCacheConfig) -> tuple[PoolBlocks, list[list[str]]]:
    """The tensors of each group's layers, and of each its layer's name, the shape of a block, the
    type, and what computes it.
    """
    attention, states = model.attention_layers(), state_layers(model)
    groups: list[list[LayerBlocks]] = []
    layers: list[list[str]] = []
    for group in cache.groups:
        tensors: list[LayerBlocks] = []
        for name in group.layer_names:
            if group.keeps_states:
                kept = states[name].state_cache
                found = [LayerBlocks(kept.num_seen, 0), LayerBlocks(kept.values, 0)]
                by: type = type(states[name].kernels)
            else:
                impl, tensor = attention[name].bound
                found = [LayerBlocks(tensor, _block_dim(tensor.shape, cache.num_blocks))]
                by = type(impl)
            tensors += found
            layers += [
                [
                    name,
                    str(each.block_shape),
                    str(each.tensor.dtype),
                    f"{by.__module__}.{by.__qualname__}",
                ]
                for each in found
            ]
        groups.append(tensors)
    return PoolBlocks(groups), layers


def _block_dim(shape: tuple[int, ...], num_blocks: int) -> int:
    """Blocks come first, or behind keys and values."""
    return 0 if shape[0] == num_blocks else 1


def _peers(
    settings: KVTransferConfig, root: bytes, pool: PoolBlocks, finished: Finished
) -> tuple[Source | None, Holder | None]:
    if not (settings.takes or settings.gives):
        return None, None
    try:
        from tokenmill.features.kv_transfer.giver import Giver
        from tokenmill.features.kv_transfer.taker import Taker
    except ImportError as error:
        raise ConfigError(
            "kv_transfer_config: blocks go over TCP by ZMQ, and pyzmq is not installed:"
            " pip install 'tokenmill[serve]'."
        ) from error
    source = Taker(settings, root) if settings.takes else None
    holder = Giver(settings, root, pool, finished.put) if settings.gives else None
    return source, holder


def _words(settings: KVTransferConfig) -> str:
    parts = []
    if settings.directory is not None:
        parts.append(f"blocks are kept in {settings.directory}, {settings.disk_bytes >> 20} MiB")
    if settings.memory_bytes:
        parts.append(f"and {settings.memory_bytes >> 20} MiB of the host's memory")
    if settings.gives:
        parts.append(f"given to other engines from {settings.host}")
    if settings.takes:
        parts.append("taken from those that requests name")
    return ", ".join(parts)
