"""Builds the scheduler. The only file of `core/` that knows which features there are."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.kv_events import KVEventsConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.kv_events import EventSink
from tokenmill.contracts.seams import GrammarManager, KVTransfer
from tokenmill.core.adapters import AdapterReady
from tokenmill.core.encoder import EncoderSchedule
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import ConfigError


def build_scheduler(
    config: EngineConfig,
    kv_cache_config: KVCacheConfig,
    grammars: GrammarManager | None = None,
    kv_transfer: KVTransfer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """A scheduler for this engine, by whose `clock` (seconds) deadlines pass.

    Raises `ConfigError` for settings that cannot work together.
    """
    encoder = None
    if config.encoder is not None:
        encoder = EncoderSchedule(
            config.encoder.max_num_encoder_input_tokens,
            config.encoder.encoder_cache_size,
            is_bidirectional=config.encoder.is_bidirectional,
        )
    scheduler = Scheduler(
        config.scheduler,
        kv_cache_config,
        vocab_size=config.model.vocab_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_speculative_tokens=config.num_speculative_tokens,
        num_lookahead_tokens=config.num_lookahead_tokens,
        grammars=grammars,
        encoder=encoder,
        kv_transfer=kv_transfer,
        clock=clock,
        readiness_rules=[AdapterReady(config.lora.max_loras)] if config.lora else [],
    )
    if config.kv_events is not None:
        scheduler.kv.report_to(_publisher(config.kv_events))
    return scheduler


def _publisher(config: KVEventsConfig) -> EventSink:
    try:
        from tokenmill.features.kv_transfer.publisher import EventPublisher
    except ImportError as error:
        raise ConfigError(
            "kv_events_config: events go over ZMQ, and pyzmq is not installed:"
            " pip install 'tokenmill[serve]'."
        ) from error
    return EventPublisher(config)
