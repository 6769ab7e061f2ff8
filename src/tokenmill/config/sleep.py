"""Whether an engine can give its memory back, and take other weights, while it lives."""

from __future__ import annotations

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import ParallelConfig
from tokenmill.errors import ConfigError, InvalidRequestError


def resolve_sleep_mode(args: EngineArgs, device: str, parallel: ParallelConfig) -> bool:
    """`enable_sleep_mode`. Raises `ConfigError` where memory cannot be given back."""
    if not args.enable_sleep_mode:
        return False
    what = _unsupported(device, parallel.world_size)
    if what is not None:
        raise ConfigError(f"enable_sleep_mode is not there {what}. Leave it out; pausing works.")
    return True


def check_sleep(config: EngineConfig, level: int) -> None:
    """Raise `InvalidRequestError` if the engine cannot sleep at this level."""
    if level == 0:
        return
    if not config.enable_sleep_mode:
        raise InvalidRequestError(
            f"level={level} needs enable_sleep_mode=True when the engine is built; level=0 (pause)"
            f" does not.",
            parameter="level",
        )
    if level > 1:
        _check_refill(config, "level=2")


def check_weight_update(config: EngineConfig) -> None:
    """Raise `InvalidRequestError` if the engine's weights cannot be replaced."""
    what = _unsupported(config.device, config.parallel.world_size)
    if what is not None:
        raise InvalidRequestError(f"replacing the weights in place is not there {what}.")
    if config.kv_transfer is not None:
        raise InvalidRequestError(
            "replacing the weights does not go together with kv_transfer_config or kv_offload_dir:"
            " what is kept outside the pool would be taken for KV of the new ones."
        )
    _check_refill(config, "replacing the weights")


def _unsupported(device: str, world_size: int) -> str | None:
    if device != "cpu":
        return f"with device={device!r} yet"
    if world_size > 1:
        return "with tensor_parallel_size or pipeline_parallel_size above 1 yet"
    return None


def _check_refill(config: EngineConfig, what: str) -> None:
    if config.model.implementation != "tokenmill":
        raise InvalidRequestError(
            f"{what} is not there with model_impl={config.model.implementation!r}: only native"
            f" families fill their weights again."
        )
