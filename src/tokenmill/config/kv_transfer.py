"""Settings of KV that comes from and goes to places outside the pool."""

from __future__ import annotations

import ipaddress
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.config.argument_types import one_of, typed_keys
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.errors import ConfigError, shown

OFFLOADING, TCP, BOTH = "OffloadingConnector", "TCPConnector", "MultiConnector"
CONNECTORS = (OFFLOADING, TCP, BOTH)
ROLES = ("kv_both", "kv_producer", "kv_consumer")
POLICIES = ("recompute", "fail")

_NAME = "kv_transfer_config"
_GB = 1 << 30
_DEFAULT_GB = 10.0
_MAX_SECONDS = 1e6
_LEAST_SECRET = 16
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Where KV is kept besides the pool, and with whom it is shared."""

    connector: str
    """One of `CONNECTORS`."""
    directory: str | None = None
    """Where blocks are kept on disk."""
    disk_bytes: int = 0
    """Most bytes that the directory may hold."""
    memory_bytes: int = 0
    """Most bytes of the host's memory that blocks of a GPU's pool may take."""
    role: str = "kv_both"
    """`kv_producer` gives blocks to others, `kv_consumer` takes them, `kv_both`."""
    engine_id: str = ""
    host: str = "127.0.0.1"
    """Address that others reach this engine at."""
    port: int = 0
    """0 takes a free one."""
    secret: bytes = field(default=b"", repr=False)
    """What only engines know that share KV; empty is none."""
    lease_seconds: float = 60.0
    """How long blocks are held for an engine that has not fetched them."""
    timeout_seconds: float = 10.0
    """How long another engine may be silent while blocks are fetched of it."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that requests may name; empty: this machine without a secret, and any with one."""
    load_failure_policy: str = "recompute"
    """`recompute` what could not be loaded, or `fail` its request."""

    @property
    def fails_requests(self) -> bool:
        """Whether a request ends with an error if its KV could not be loaded."""
        return self.load_failure_policy == "fail"

    def may_name(self, host: str) -> bool:
        """Whether requests may have blocks fetched of this host."""
        if self.allowed_hosts:
            return host in self.allowed_hosts
        return bool(self.secret) or is_loopback(host)

    @property
    def gives(self) -> bool:
        """Whether it holds blocks for others."""
        return self.connector != OFFLOADING and self.role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Whether it fetches blocks of others."""
        return self.connector != OFFLOADING and self.role != "kv_producer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Keys of `kv_transfer_config`."""

    kv_connector: str | None = None
    kv_role: str = "kv_both"
    engine_id: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extra:
    """Keys of its `kv_connector_extra_config`."""

    offload_dir: str | None = None
    offload_gb: float | None = None
    cpu_bytes_to_use: int = 0
    secret_file: str | None = None
    lease_seconds: float = 60.0
    timeout_seconds: float = 10.0
    allowed_hosts: list[Any] = field(default_factory=list)


def resolve_kv_transfer(
    args: EngineArgs, device: str, speculation: SpeculativeConfig | None, *, pools: bool
) -> KVTransferConfig | None:
    """The settings on this device; None if nothing was asked for.

    Raises `ConfigError` that names the setting.
    """
    if not args.kv_transfer_config and args.kv_offload_dir is None:
        if args.kv_offload_gb is not None:
            raise ConfigError(
                f"kv_offload_gb={args.kv_offload_gb:g} needs kv_offload_dir: where to keep it."
            )
        return None
    given = typed_keys(_NAME, args.kv_transfer_config, _Given)
    extra = typed_keys(
        f"{_NAME}.kv_connector_extra_config", given.kv_connector_extra_config, _Extra
    )
    extra = _with_flags(extra, args)
    _check_engine(args, speculation, pools=pools)
    has_tier = bool(extra.offload_dir or extra.cpu_bytes_to_use)
    config = KVTransferConfig(
        connector=_connector(given, has_tier=has_tier),
        directory=extra.offload_dir and str(Path(extra.offload_dir).expanduser().absolute()),
        disk_bytes=_disk_bytes(extra),
        memory_bytes=_memory_bytes(extra, device),
        role=one_of(f"{_NAME}.kv_role", given.kv_role, ROLES),
        engine_id=given.engine_id or uuid.uuid4().hex,
        host=given.kv_ip,
        port=_port(given.kv_port, args.data_parallel_size),
        secret=_secret(extra),
        lease_seconds=_seconds("lease_seconds", extra.lease_seconds),
        timeout_seconds=_seconds("timeout_seconds", extra.timeout_seconds),
        allowed_hosts=_hosts(extra),
        load_failure_policy=one_of(
            f"{_NAME}.kv_load_failure_policy", given.kv_load_failure_policy, POLICIES
        ),
    )
    _check_address(config)
    return config


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine is meant."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_flags(extra: _Extra, args: EngineArgs) -> _Extra:
    """With the flags that are short for two of its keys."""
    if args.kv_offload_dir is not None:
        extra = replace(extra, offload_dir=args.kv_offload_dir)
    if args.kv_offload_gb is not None:
        extra = replace(extra, offload_gb=args.kv_offload_gb)
    return extra


def _check_engine(args: EngineArgs, speculation: SpeculativeConfig | None, *, pools: bool) -> None:
    """Refuse what KV from outside cannot go with."""
    if pools:
        raise ConfigError(f"{_NAME}: a pooling model keeps no KV; leave it out.")
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"{_NAME} finds blocks by the hashes of the prefix cache, and"
            " enable_prefix_caching is off; turn it on."
        )
    if speculation is not None and speculation.draft is not None:
        raise ConfigError(
            f"{_NAME}: KV from outside is that of the model alone, and"
            f" speculative_config.method={speculation.method!r} needs the draft's beside it; take"
            " method='ngram' or 'suffix'."
        )


def _connector(given: _Given, *, has_tier: bool) -> str:
    if given.kv_connector is None:
        return OFFLOADING
    name = one_of(f"{_NAME}.kv_connector", given.kv_connector, CONNECTORS)
    if name == TCP and has_tier:
        return BOTH
    if name != TCP and not has_tier:
        raise ConfigError(
            f"{_NAME}.kv_connector={name!r} keeps KV outside the pool; say where: kv_offload_dir"
            " (or offload_dir or cpu_bytes_to_use in kv_connector_extra_config)."
        )
    return name


def _disk_bytes(extra: _Extra) -> int:
    if extra.offload_dir is None:
        if extra.offload_gb is not None:
            raise ConfigError(f"kv_offload_gb={extra.offload_gb:g} needs kv_offload_dir.")
        return 0
    size = _DEFAULT_GB if extra.offload_gb is None else extra.offload_gb
    if not 0 < size <= 1e6:
        raise ConfigError(f"kv_offload_gb={size:g} must be more than 0 and at most 1e6.")
    return int(size * _GB)


def _memory_bytes(extra: _Extra, device: str) -> int:
    size = extra.cpu_bytes_to_use
    if size < 0:
        raise ConfigError(f"{_NAME}: cpu_bytes_to_use={size} must be at least 0.")
    if size and device == "cpu":
        raise ConfigError(
            f"{_NAME}: cpu_bytes_to_use={size} is for the pool of a GPU; on a CPU the pool lies in"
            " that memory already: raise kv_cache_memory_bytes by as much instead."
        )
    return size


def _secret(extra: _Extra) -> bytes:
    if extra.secret_file is None:
        return b""
    path = Path(extra.secret_file).expanduser()
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"{_NAME}: secret_file={str(path)!r} cannot be read: {error.strerror}."
        ) from error
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"{_NAME}: secret_file={str(path)!r} holds {len(secret)} bytes; write at least"
            f" {_LEAST_SECRET} random ones."
        )
    return secret


def _hosts(extra: _Extra) -> tuple[str, ...]:
    for each in extra.allowed_hosts:
        if not each or not isinstance(each, str):
            raise ConfigError(f"{_NAME}: allowed_hosts holds {shown(each)}; give names of hosts.")
    return tuple(extra.allowed_hosts)


def _check_address(config: KVTransferConfig) -> None:
    """What leaves this machine needs a secret: whoever connects can read what others have asked."""
    if config.connector == OFFLOADING:
        return
    if config.host in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"{_NAME}.kv_ip={config.host!r} is told to other engines, which cannot reach it; give"
            " an address of this machine."
        )
    for host in (config.host, *config.allowed_hosts):
        if not (config.secret or is_loopback(host)):
            raise ConfigError(
                f"{_NAME}: {host!r} is not this machine alone, and there is no secret: give all"
                " engines the same secret_file in kv_connector_extra_config."
            )


def _port(port: int, num_replicas: int) -> int:
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(f"{_NAME}.kv_port={port} must lie between 0 and {_MAX_PORT}.")
    if port and num_replicas > 1:
        raise ConfigError(
            f"{_NAME}.kv_port={port} is one port, and data_parallel_size={num_replicas} engines"
            " need one each; leave it out, and each takes a free one."
        )
    return port


def _seconds(name: str, value: float) -> float:
    if not 0 < value <= _MAX_SECONDS:
        raise ConfigError(
            f"{_NAME}: {name}={value:g} must be more than 0 and at most {_MAX_SECONDS:g} seconds."
        )
    return value
