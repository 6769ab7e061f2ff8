"""Debug mode of the prefix cache: compare tokens on every hit instead of trusting the hash."""

from __future__ import annotations

from typing import Protocol

from tokenmill.core.kv.block_pool import KVCacheBlock
from tokenmill.core.request import Request


class HitVerifier(Protocol):
    """Looks over the shoulder of the prefix cache."""

    def remember(self, block: KVCacheBlock, request: Request, position: int) -> None:
        """`block` now holds the request's block number `position`."""
        ...

    def verify(self, block: KVCacheBlock, request: Request, position: int) -> None:
        """`block` was found for the request's block number `position`."""
        ...


class TrustHashes:
    """256 bits do not collide."""

    def remember(self, block: KVCacheBlock, request: Request, position: int) -> None:
        pass

    def verify(self, block: KVCacheBlock, request: Request, position: int) -> None:
        pass


class CompareTokens:
    """Keeps the parent hash and the tokens of every cached block; a false hit is an assertion."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[int, tuple[bytes | None, list[int]]] = {}

    def remember(self, block: KVCacheBlock, request: Request, position: int) -> None:
        self._contents[block.block_id] = self._content(request, position)

    def verify(self, block: KVCacheBlock, request: Request, position: int) -> None:
        kept, wanted = self._contents[block.block_id], self._content(request, position)
        assert kept == wanted, (
            f"hash collision: block {block.block_id} holds {kept[1]}, but request"
            f" {request.request_id} was given it for {wanted[1]}"
        )

    def _content(self, request: Request, position: int) -> tuple[bytes | None, list[int]]:
        start = position * self._block_size
        parent = request.block_hashes[position - 1] if position else None
        return parent, request.all_token_ids[start : start + self._block_size]
