"""The key under which a full block of KV is found again.

    hash of block i = SHA-256(hash of block i-1 | number of ids | ids | extras)

The chain starts at a root that is random in each process, so that nobody outside can craft two
prompts with the same hash. Extras are what the KV depends on besides the ids; each is written as a
tag, a length and its bytes, so that no two different lists of extras look alike.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Iterator
from typing import Protocol

from tokenmill.core.request import Request

DIGEST_BYTES = 32
PROCESS_ROOT = secrets.token_bytes(DIGEST_BYTES)
"""Parent of every first block."""

_SALT = b"s"
_ADAPTER = b"a"
_FEATURE = b"f"


def hash_block(parent: bytes, token_ids: list[int], extras: bytes = b"") -> bytes:
    """Hash of a block of ids (int32 each) that follows the block hashed `parent`; 32 bytes."""
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<I", len(token_ids)))
    digest.update(array("i", token_ids).tobytes())
    digest.update(extras)
    return digest.digest()


class BlockHasher(Protocol):
    """Keeps the block hashes of a request up with its tokens."""

    def extend(self, request: Request) -> None:
        """Append the hashes of the full blocks that have none yet."""
        ...


class ChainedBlockHasher:
    """Hashes every full block once."""

    def __init__(self, block_size: int, root: bytes = PROCESS_ROOT) -> None:
        self._block_size = block_size
        self._root = root

    def extend(self, request: Request) -> None:
        hashes = request.block_hashes
        size = self._block_size
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else self._root
            token_ids = request.all_token_ids[start : start + size]
            hashes.append(hash_block(parent, token_ids, _extras(request, start, start + size)))


class NoBlockHasher:
    """Prefix caching is off: no block has a hash, so none is kept or found."""

    def extend(self, request: Request) -> None:
        pass


def _extras(request: Request, start: int, end: int) -> bytes:
    return b"".join(
        tag + struct.pack("<I", len(value)) + value
        for tag, value in _extra_values(request, start, end)
    )


def _extra_values(request: Request, start: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """What the KV of tokens `start` to `end` depends on, besides the ids, with a tag each."""
    data = request.data
    if start == 0 and data.cache_salt is not None:
        yield _SALT, data.cache_salt.encode()
    if data.adapter is not None:
        yield _ADAPTER, data.adapter.load_id.encode()
    for feature in data.mm_features:
        if feature.offset < end and start < feature.offset + feature.length:
            # The same image, shifted within the block, has other KV.
            yield (
                _FEATURE,
                struct.pack("<q", feature.offset - start) + feature.content_hash.encode(),
            )
