"""Adapters in the host's memory: which are kept, and what is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.contracts.request import AdapterRef
from tokenmill.errors import AdapterError
from tokenmill.features.lora.adapter import Adapter
from tokenmill.features.lora.adapters import HostCache


class Directories:
    """Reads adapters whose content is a word."""

    def __init__(self, **contents: str) -> None:
        self.contents = contents
        self.read_paths: list[str] = []

    def read(self, directory: Path) -> Adapter:
        self.read_paths.append(str(directory))
        return Adapter(self.contents[str(directory)], {}, rank=1, num_modules=1)


def cache_of(directories: Any, size: int) -> HostCache:
    return HostCache(directories, [], size)


def test_those_used_last_are_kept() -> None:
    directories = Directories(a="one", b="two", c="three")
    cache = cache_of(directories, size=2)
    cache.read("a")
    cache.read("b")
    cache.get(AdapterRef("a", "one", "a"))
    cache.read("c")
    directories.read_paths.clear()
    cache.get(AdapterRef("a", "one", "a"))
    cache.get(AdapterRef("c", "three", "c"))
    assert directories.read_paths == []
    assert cache.get(AdapterRef("b", "two", "b")).load_id == "two"
    assert directories.read_paths == ["b"]


def test_a_request_never_gets_other_weights_than_it_began_with() -> None:
    directories = Directories(a="one", b="two")
    cache = cache_of(directories, size=1)
    cache.read("a")
    cache.read("b")
    directories.contents["a"] = "other weights"
    with pytest.raises(AdapterError, match="have changed since it was loaded"):
        cache.get(AdapterRef("a", "one", "a"))
