"""What a model's layers keep, from its config alone."""

from __future__ import annotations

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.kv_layout import model_windows
from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheKind, KVCacheSpec
from tokenmill.contracts.kv_groups import group_cache
from tokenmill.errors import ConfigError


def parameters_of(config: EngineConfig) -> ModelParameters:
    """Sizes of the engine's model. Raises `ConfigError` for an engine that cannot be simulated."""
    model, parallel = config.model, config.parallel
    is_native = model.implementation == "tokenmill"
    parameters = read_parameters(model.hf_config, caches_latents=is_native)
    unknown = {
        f"{model.architecture} keeps states": parameters.states is not None,
        f"{model.name} pools (runner='pooling')": model.pooling is not None,
        f"the model is divided among {parallel.world_size} processes": parallel.world_size > 1,
        "KV is kept outside the pool": config.kv_transfer is not None,
        f"data_parallel_size={config.data_parallel_size} (num_workers says how many engines)": (
            config.data_parallel_size > 1
        ),
    }
    for what, is_so in unknown.items():
        if is_so:
            raise ConfigError(f"{what}, which `tokenmill simulate` does not know. Leave it out.")
    return parameters


def cache_of(config: EngineConfig) -> KVCacheConfig:
    """The pool that a worker of this engine would have. Raises `ConfigError` as above."""
    parameters = parameters_of(config)
    windows = model_windows(config.model.hf_config, parameters, config.model.implementation)
    specs = {
        f"layers.{layer}": KVCacheSpec(
            num_kv_heads=parameters.num_kv_heads,
            head_size=parameters.head_size,
            dtype=config.cache.dtype,
            kind=KVCacheKind.FULL if window is None else KVCacheKind.SLIDING_WINDOW,
            sliding_window=window,
            stores_values=parameters.stores_values,
        )
        for layer, window in enumerate(windows)
    }
    return group_cache(config, specs, {})
