"""What a user may set about the HTTP server: flags of `tokenmill serve`, derived from this class.

The engine behind it has its own settings (`engine_args.py`). None means "off" or "choose for me",
as each text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.config.argument_types import convert_fields, one_of
from tokenmill.errors import ConfigError, shown

LOG_FORMATS = ("text", "json")
REASONING_FIELDS = ("both", "reasoning_content", "reasoning")
NO_PARSER = "none"
_AT_LEAST = {
    "port": 0,
    "max_body_bytes": 1024,
    "max_header_bytes": 1024,
    "max_n": 1,
    "max_prompts": 1,
    "request_timeout": 0.001,
    "body_timeout": 0.001,
    "drain_timeout": 0.0,
    "stream_keep_alive": 0.05,
    "log_stats_interval": 0.0,
    "response_store_bytes": 0,
    "response_ttl": 0.001,
}
"""Smallest value of a number."""
_CHOICES = {"log_format": LOG_FORMATS, "reasoning_field": REASONING_FIELDS}


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Settings of one server. Raises `ConfigError` for a value of another type or out of range."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    headless: bool = False
    """Serve nothing: be the processes that machine node_rank has of a model whose server is on
    machine 0 (see docs/parallel.md)."""
    port: int = 8000
    """TCP port; 0 takes a free one, which the banner names."""
    uds: str | None = None
    """Path of a unix socket to listen on in place of host and port."""
    root_path: str = ""
    """Prefix that a proxy in front of the server strips from paths."""
    ssl_certfile: str | None = None
    """Certificate chain (PEM); with it the server speaks HTTPS."""
    ssl_keyfile: str | None = None
    """Key of the certificate (PEM)."""
    served_model_name: list[str] | None = None
    """Names under which clients ask for the model; the first is the one in answers. The model's
    own name unless given."""
    api_key: list[str] | None = None
    """Key that requests must bring, as `Authorization: Bearer KEY` or `x-api-key`."""
    api_key_file: str | None = None
    """File with further keys, one a line."""
    isolate_api_keys: bool = False
    """Share cached prefixes only among requests with the same key."""
    enable_admin: bool = False
    """Serve POST /reset_prefix_cache, /sleep, /wake_up, /pause, /resume and /update_weights."""
    weights_root: str | None = None
    """Directory below which POST /update_weights may name weights; without it, none."""
    lora_modules: list[str] | None = None
    """Adapters to begin with, as NAME=PATH; requests choose one as their model (enable_lora)."""
    enable_lora_updates: bool = False
    """Serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter, to whoever has an API key."""
    lora_root: str | None = None
    """Directory below which requests may name adapters to load; without it, none."""
    allowed_origins: list[str] | None = None
    """Origins whose pages may call the server from a browser (CORS), such as
    https://chat.example.org; * is any."""
    request_timeout: float | None = None
    """Seconds after which an unfinished request ends with an error; None is never."""
    body_timeout: float = 60.0
    """Seconds that a client may take to send a request."""
    max_body_bytes: int = 33_554_432
    """Largest request body."""
    max_header_bytes: int = 65_536
    """Largest request line and headers, together."""
    max_n: int = 128
    """Most sequences (`n`) for one prompt."""
    max_prompts: int = 512
    """Most prompts in one completion request."""
    drain_timeout: float = 30.0
    """Seconds that requests may take to finish after SIGTERM; a second signal ends them at once."""
    stream_keep_alive: float = 15.0
    """Seconds without news after which a stream gets a comment line, so that proxies keep it."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools: a family such as hermes or mistral (see docs/tools.md),
    or none. Recognised by the chat template unless given."""
    enable_auto_tool_choice: bool | None = None
    """Let models choose whether to call a tool. On unless nobody knows how the model writes
    calls."""
    reasoning_field: str = "both"
    """Name under which messages have the model's reasoning: reasoning_content, reasoning, or
    both."""
    trust_request_chat_template: bool = False
    """Take `chat_template` from requests."""
    enable_prompt_tokens_details: bool = False
    """Tell in `usage` how many prompt tokens came from the prefix cache. Off, since it tells a
    client what others have asked."""
    response_store: str | None = None
    """File (SQLite) that keeps what POST /v1/responses has answered; in memory unless given."""
    response_store_bytes: int = 268_435_456
    """Most bytes of responses to keep; those made or continued longest ago go first. 0 keeps
    none."""
    response_ttl: float = 86_400.0
    """Seconds after a response was made, or last continued, until it is forgotten."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces: it gets a span
    for each prompt (see docs/operations.md)."""
    log_requests: bool = False
    """One line for each request: status, times, tokens; never a prompt or a key."""
    log_format: str = "text"
    """text (in colour on a terminal) or json (one object a line)."""
    log_stats_interval: float = 10.0
    """Seconds between lines on load and throughput, written while requests run; 0 is never."""

    def __post_init__(self) -> None:
        check_settings(self, _AT_LEAST, _CHOICES)
        if self.enable_lora_updates and not (self.api_key or self.api_key_file):
            raise ConfigError("enable_lora_updates needs an API key (api_key or api_key_file).")
        for name in ("served_model_name", "api_key"):
            if not all(
                isinstance(each, str) and each.strip() for each in getattr(self, name) or []
            ):
                raise ConfigError(
                    f"{name} holds something that is no text, or empty; leave it out."
                )


def check_settings(
    settings: Any, at_least: Mapping[str, float], choices: Mapping[str, Sequence[str]]
) -> None:
    """What is asked of the settings of servers and of routers: types, numbers, choices, the port
    and TLS. Raises `ConfigError`.
    """
    convert_fields(settings)
    for name, least in at_least.items():
        value = getattr(settings, name)
        if value is not None and not least <= value < 2**53:
            raise ConfigError(f"{name}={shown(value)} must be at least {least:g}.")
    for name, known in choices.items():
        one_of(name, getattr(settings, name), known)
    if settings.port > 65_535:
        raise ConfigError(f"port={settings.port} must be at most 65535.")
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile belong together; give both or neither.")
