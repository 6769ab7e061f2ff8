"""What a user may set about the router: flags of `tokenmill route`, derived from this class."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tokenmill.config.serve_args import LOG_FORMATS, check_settings
from tokenmill.errors import ConfigError, shown

POLICIES = ("prefix", "least_loaded", "round_robin", "session")
_AT_LEAST = {
    "port": 0,
    "max_body_bytes": 1024,
    "max_header_bytes": 1024,
    "max_in_flight": 1,
    "retries": 0,
    "body_timeout": 0.001,
    "connect_timeout": 0.001,
    "backend_timeout": 0.001,
    "health_interval": 0.01,
    "health_timeout": 0.001,
    "eject_after": 1,
    "max_eject_seconds": 0.001,
    "drain_timeout": 0.0,
    "max_index_blocks": 0,
}
"""Smallest value of a number."""
_CHOICES = {"log_format": LOG_FORMATS, "policy": POLICIES}


@dataclass(frozen=True, kw_only=True)
class RouteArgs:
    """Settings of one router. Raises `ConfigError` for a value of another type or out of range."""

    backend: list[str] | None = None
    """A server to route to: http://HOST:PORT, https://HOST or unix:/PATH, without /v1."""
    prefill: list[str] | None = None
    """A server that computes prompts for those of --decode."""
    decode: list[str] | None = None
    """A server that goes on where those of --prefill end."""
    policy: str = "prefix"
    """Who gets a request: prefix (who has most of its prompt, unless that one is too busy),
    least_loaded, round_robin, or session (always the same, by session_header, prompt_cache_key or
    user)."""
    session_header: str = "x-session-id"
    """Header that names a session."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8080
    """TCP port; 0 takes a free one, which the banner names."""
    uds: str | None = None
    """Path of a unix socket to listen on in place of host and port."""
    root_path: str = ""
    """Prefix that a proxy in front of the router strips from paths."""
    ssl_certfile: str | None = None
    """Certificate chain (PEM); with it the router speaks HTTPS."""
    ssl_keyfile: str | None = None
    """Key of the certificate (PEM)."""
    api_key: list[str] | None = None
    """Key that requests must bring; it is not passed on. Without one, what clients bring goes to
    the backends."""
    api_key_file: str | None = None
    """File with further keys, one a line."""
    backend_api_key: list[str] | None = None
    """Key that the backends want: one for all, or one for each in their order."""
    allowed_origins: list[str] | None = None
    """Origins whose pages may call the router from a browser (CORS); * is any."""
    max_body_bytes: int = 33_554_432
    """Largest request body."""
    max_header_bytes: int = 65_536
    """Largest request line and headers, together."""
    max_in_flight: int = 4096
    """Most requests at the same time; more are refused with 429."""
    body_timeout: float = 60.0
    """Seconds that a client may take to send a request."""
    retries: int = 2
    """How many other backends are tried where nothing of an answer has come."""
    connect_timeout: float = 2.0
    """Seconds that a connection to a backend may take."""
    backend_timeout: float = 600.0
    """Seconds without a byte after which a backend is no longer waited for."""
    health_interval: float = 2.0
    """Seconds between two questions to each backend how it is."""
    health_timeout: float = 2.0
    """Seconds that it may take to answer them."""
    health_path: str = "/health"
    """Path of that question; 200 is well."""
    eject_after: int = 5
    """Failures in a row after which a backend gets no requests for a while."""
    max_eject_seconds: float = 60.0
    """Longest such while; the first is a second, each further one twice as long."""
    max_index_blocks: int = 200_000
    """Pieces of 128 bytes of prompts that are remembered of each backend, about 150 bytes each."""
    drain_timeout: float = 30.0
    """Seconds that requests may take to finish after SIGTERM; a second signal ends them at once."""
    log_requests: bool = False
    """One line for each request: status, times, backend; never a prompt or a key."""
    log_format: str = "text"
    """text (in colour on a terminal) or json (one object a line)."""

    def __post_init__(self) -> None:
        check_settings(self, _AT_LEAST, _CHOICES)
        self._check_backends()

    @property
    def urls(self) -> list[str]:
        """All backends: those for everything, then those for prompts, then those that go on."""
        return [*(self.backend or []), *(self.prefill or []), *(self.decode or [])]

    def _check_backends(self) -> None:
        if not self.urls:
            raise ConfigError(
                "backend is missing; name a server, as in --backend http://HOST:8000."
            )
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError("prefill and decode belong together; give both or neither.")
        if self.prefill and self.backend:
            raise ConfigError("backend does everything, prefill and decode share it; give either.")
        for name in ("backend", "prefill", "decode"):
            for url in getattr(self, name) or []:
                check_url(name, url)
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("a backend is named twice; name each once.")
        keys = self.backend_api_key or []
        if len(keys) not in (0, 1, len(self.urls)):
            raise ConfigError(
                f"backend_api_key is given {len(keys)} times for {len(self.urls)} backends; give"
                f" one for all, or one for each in their order."
            )


def check_url(name: str, url: str) -> None:
    """Raise `ConfigError` for what is no address of a backend."""
    parts = urlsplit(url)
    try:
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        is_server = False
    is_path = parts.scheme == "unix" and bool(parts.path)
    if not (is_server or is_path) or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"{name}={shown(url)} must be http://HOST:PORT, https://HOST or unix:/PATH; a key"
            f" belongs to backend_api_key."
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{name}={shown(url)} must leave out /v1, which requests bring.")
