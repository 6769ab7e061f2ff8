"""The adapters that requests may name, as the front end knows them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.contracts.request import AdapterInfo, AdapterRef
from tokenmill.errors import AdapterError, ModelNotFoundError, did_you_mean
from tokenmill.features.lora.peft import signature
from tokenmill.lora_request import LoRARequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter that the core has read and found good."""

    ref: AdapterRef
    info: AdapterInfo
    signature: tuple[tuple[int, int, int], ...]
    """Of its files when they were read."""


class AdapterRegistry:
    """By name. Taking a name away, or giving it other weights, changes nothing for requests that
    are under way: they carry what they run with.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._known: dict[str, KnownAdapter] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def get(self, name: str) -> KnownAdapter:
        """Raises `ModelNotFoundError` if there is none of this name."""
        if name not in self._known:
            raise ModelNotFoundError(
                f"There is no adapter {name!r}.{did_you_mean(name, self._known)}"
            )
        return self._known[name]

    def check_enabled(self) -> None:
        """Raise `AdapterError` where there are no adapters."""
        if not self._is_enabled:
            raise AdapterError(
                "this engine takes no adapters; start it with enable_lora=True.",
                parameter="lora_request",
            )

    def begin(self, request: LoRARequest) -> Loading:
        """What the core is to read for a request, if it is not known already.

        Raises `AdapterError` where there are no adapters, or no such files.
        """
        self.check_enabled()
        path = os.path.abspath(request.path)
        found = signature(Path(path))
        known = self._known.get(request.name)
        fresh = known is not None and known.ref.path == path and known.signature == found
        return Loading(request.name, path, found, known.ref if known and fresh else None)

    def finish(self, loading: Loading, info: AdapterInfo) -> AdapterRef:
        """Take in what the core has read; its name means this from now on."""
        ref = AdapterRef(loading.name, info.load_id, loading.path)
        self._known[loading.name] = KnownAdapter(ref, info, loading.signature)
        logger.info(
            "adapter %r: rank %d, %d modules, %s",
            loading.name, info.rank, info.num_modules, loading.path,
        )  # fmt: skip
        return ref

    def remove(self, name: str) -> KnownAdapter:
        """Forget a name. Raises `ModelNotFoundError` if there is none of this name."""
        known = self.get(name)
        del self._known[name]
        return known


@dataclass(frozen=True, slots=True)
class Loading:
    """An adapter on its way."""

    name: str
    path: str
    signature: tuple[tuple[int, int, int], ...]
    known: AdapterRef | None
    """Set where its files have been read, and have not changed since."""
