"""How a served engine treats load and failure. Nothing here changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Limits of the queue, and how long a silent or dying core is put up with.

    Raises `ConfigError` for a number that cannot work.
    """

    max_queue: int = 1024
    """Most sequences that wait beside the `max_num_seqs` that run; more are refused with 429."""
    max_queue_tokens: int | None = None
    """Most prompt tokens of all unfinished requests together; None is eight times what the KV cache
    holds. A request that comes when there is no other is never refused for it."""
    max_restarts: int = 10
    """How often the core may be started again within `restart_window`; then the engine is dead."""
    restart_window: float = 600.0
    """Seconds after which a restart is forgotten."""
    max_restart_delay: float = 30.0
    """Seconds; the longest pause before a restart. The first comes at once, each later one after
    twice the pause of the one before."""
    heartbeat_timeout: float = 5.0
    """Seconds without a sign of life after which the core counts as unhealthy."""
    freeze_timeout: float = 30.0
    """Seconds without a sign of life after which the core is killed and started again."""
    step_timeout: float = 300.0
    """Seconds that one step may take before the core is killed and started again."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative.")
        if self.max_queue_tokens is not None and self.max_queue_tokens < 1:
            raise ConfigError(f"max_queue_tokens={self.max_queue_tokens} must be at least 1.")
        for name in (
            "restart_window",
            "max_restart_delay",
            "heartbeat_timeout",
            "freeze_timeout",
            "step_timeout",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0 seconds.")
