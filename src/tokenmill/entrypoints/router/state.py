"""What all requests of a router share."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.http.auth import ApiKeys, api_keys
from tokenmill.entrypoints.http.errors import RETRY_SECONDS, UnavailableError
from tokenmill.entrypoints.router.backend import Backend, Role, make_backends
from tokenmill.entrypoints.router.metrics import RouterMetrics
from tokenmill.entrypoints.router.policies import Picker
from tokenmill.errors import ModelNotFoundError, QueueFullError, shown

_SHOWN_NAMES = 5


class NoBackendError(UnavailableError):
    """No backend takes requests now. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(slots=True)
class RouterState:
    """Changed by the event loop only."""

    args: RouteArgs
    backends: list[Backend]
    keys: ApiKeys
    picker: Picker
    metrics: RouterMetrics
    draining: bool = False
    """No request is taken any more; those that run may finish."""
    num_inside: int = 0
    """Requests that are read, or on their way."""
    active: set[asyncio.Task[None]] = field(default_factory=set)
    """Those on their way."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the block, a request is here. Raises `UnavailableError` or `QueueFullError` if none is
        taken now.
        """
        if self.draining:
            raise UnavailableError("the router is stopping and takes no more requests.")
        if self.num_inside >= self.args.max_in_flight:
            raise QueueFullError(
                f"the router has {self.num_inside} requests of at most {self.args.max_in_flight}"
                f" (max_in_flight); try again in {RETRY_SECONDS} s.",
                retry_after=RETRY_SECONDS,
            )
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def check_ready(self) -> None:
        """Raise `UnavailableError` if a request would be refused for lack of backends."""
        if self.draining:
            raise UnavailableError("the router is stopping and takes no more requests.")
        for role in {each.role for each in self.backends} - {Role.PREFILL}:  # which others can do
            if not any(each.is_available for each in self.backends if each.role is role):
                raise self.no_backend([each for each in self.backends if each.role is role])

    def candidates(
        self, model: str | None, role: Role, tried: Collection[Backend]
    ) -> list[Backend]:
        """Backends that may have a request for a model now."""
        return [
            each
            for each in self.backends
            if each.role is role and each.is_available and each.serves(model) and each not in tried
        ]

    def nobody(self, model: str | None, role: Role) -> Exception:
        """Why there is no candidate."""
        able = [each for each in self.backends if each.role is role and each.serves(model)]
        if able:
            return self.no_backend(able)
        known = sorted({name for each in self.backends for name in each.models or ()})
        names = ", ".join(map(repr, known[:_SHOWN_NAMES])) or "none"
        return ModelNotFoundError(
            f"model {shown(model)} is served by no backend; there is {names}."
        )

    def no_backend(self, backends: list[Backend]) -> NoBackendError:
        """None of these is available."""
        waits = [each.seconds_away for each in backends if each.is_up]
        seconds = max(min(waits, default=self.args.health_interval), RETRY_SECONDS)
        return NoBackendError(
            f"none of {len(backends)} backends takes requests now; try again in {seconds:.0f} s.",
            retry_after=seconds,
        )

    def forget(self, backend: Backend) -> None:
        """A backend's cache is gone."""
        self.picker.forget(backend)

    def close(self) -> None:
        """End all connections to backends."""
        for backend in self.backends:
            backend.close()


def make_router(args: RouteArgs) -> RouterState:
    """A router that knows nothing of its backends yet. Raises `ConfigError` for a file of keys that
    cannot be read.
    """
    backends = make_backends(args)
    picker = Picker(args, len(backends))
    return RouterState(args, backends, api_keys(args), picker, RouterMetrics(backends, picker))
