"""Settings of events on the KV cache's blocks."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config.argument_types import one_of, typed_keys
from tokenmill.config.engine_args import EngineArgs
from tokenmill.errors import ConfigError

_NAME = "kv_events_config"
_AT_LEAST_ONE = ("buffer_steps", "hwm", "max_queue_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where it is told which blocks have come into the prefix cache and gone out of it."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    """zmq, or null: nobody is told."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address to publish at; `tcp://*:5557` is every address of this machine."""
    replay_endpoint: str | None = None
    """Address where batches are asked for that were missed."""
    buffer_steps: int = 10_000
    """Batches kept for that."""
    hwm: int = 100_000
    """Batches that wait for a slow listener; more are dropped for it."""
    max_queue_size: int = 100_000
    """Batches that wait to be sent; more are dropped."""
    topic: str = ""
    """In front of every message, for listeners to choose by."""


def resolve_kv_events(args: EngineArgs) -> KVEventsConfig | None:
    """The settings; None if nobody is to be told. Raises `ConfigError` that names the setting."""
    config = typed_keys(_NAME, args.kv_events_config, KVEventsConfig)
    one_of(f"{_NAME}.publisher", config.publisher, ("zmq", "null"))
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"{_NAME}.{name}={getattr(config, name)} must be at least 1.")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    _check_engine(args)
    return config


def _check_engine(args: EngineArgs) -> None:
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"{_NAME} tells of the prefix cache, and enable_prefix_caching is off; turn it on."
        )
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"{_NAME} has one endpoint, and data_parallel_size={args.data_parallel_size} engines"
            " would need one each; start them as servers of their own."
        )
