"""Limits of a step that follow from the settings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.contracts.kv_cache import KVCacheGroup
from tokenmill.errors import ConfigError


def check_limits(config: SchedulerConfig) -> None:
    """Raise `ConfigError` for limits that cannot work."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1.")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is less than"
            f" max_model_len={config.max_model_len}, and enable_chunked_prefill is off: a long"
            " prompt could never be computed. Turn it on, or raise max_num_batched_tokens."
        )


def check_groups(groups: Sequence[KVCacheGroup], num_speculative_tokens: int) -> None:
    """Raise `ConfigError` for layers that cannot take drafts back."""
    states = [group.layer_names[0] for group in groups if group.keeps_states]
    if states and num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens={num_speculative_tokens} needs layers that can forget a token,"
            f" but {states[0]} keeps one state of all: this model runs without speculation."
        )


def max_chunk(config: SchedulerConfig) -> int:
    """Most tokens of one request in one step."""
    if config.enable_chunked_prefill and config.long_prefill_token_threshold:
        return config.long_prefill_token_threshold
    return config.max_num_batched_tokens
