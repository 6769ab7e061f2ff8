"""Which prefixes have been sent where, and where a request is best sent for it.

Nobody is asked what a cache holds: whoever sends requests knows what it has sent, and forgets what
was used longest ago. What it knows wrongly costs time, never a result.

    key of block i = BLAKE2b(key of block i-1 | bytes of block i)

Used for blocks of token ids by an engine with several cores (`replicas.py`), and for pieces of
request bodies by the router (`entrypoints/router`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_KEY_BYTES = 8
WAITING_WEIGHT = 4
"""A request that waits counts as much as so many that run."""

NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})


def prefix_keys(
    data: bytes,
    block_bytes: int,
    *,
    root: bytes = b"",
    extras: Mapping[int, bytes] = NO_EXTRAS,
    most: int | None = None,
) -> list[bytes]:
    """A key for each full block of `block_bytes` of `data`, which stands for all before it, too.

    Equal data have equal keys only below the same `root`, and with the same `extras`: what belongs
    to a block besides its bytes, by the block's number. At most `most` keys.
    """
    count = len(data) // block_bytes
    key, keys = root, []
    for number in range(count if most is None else min(count, most)):
        block = data[number * block_bytes : (number + 1) * block_bytes]
        content = key + block + extras.get(number, b"")
        key = hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()
        keys.append(key)
    return keys


class PrefixIndex:
    """The blocks that each of several owners was sent last.

    Of a chain of keys, an owner is held to have the first few or all, never a later one without
    those before it: a chain is used from its end to its start, so that ends are forgotten first.
    """

    def __init__(self, num_owners: int, max_blocks: int) -> None:
        """Up to `max_blocks` blocks are remembered of each owner, about 150 bytes each."""
        self._max_blocks = max_blocks
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_owners)]

    def matched(self, owner: int, keys: Sequence[bytes]) -> int:
        """How many of the leading blocks the owner has been sent."""
        held = self._held[owner]
        if not keys or keys[0] not in held:  # as nearly all of many owners
            return 0
        return bisect_left(keys, True, key=lambda key: key not in held)

    def record(self, owner: int, keys: Sequence[bytes]) -> None:
        """These blocks are sent to the owner; what is too much is forgotten."""
        held = self._held[owner]
        for key in reversed(keys[: self._max_blocks]):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def forget(self, owner: int) -> None:
        """The owner has lost all that it had."""
        self._held[owner].clear()

    def num_blocks(self, owner: int) -> int:
        """Blocks that are remembered."""
        return len(self._held[owner])


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request is best sent."""

    owner: int
    num_matched: int
    """Leading blocks that the owner has been sent before."""


class PrefixBalancer:
    """Sends requests where most of their prefix is, unless others there would hold them up longer
    than the rest of them.

    Each owner has a price: its load (`WAITING_WEIGHT * waiting + running`), and a unit more for
    every `blocks_per_load` blocks of the request that it would compute anew. The lowest wins, so
    that without a known prefix the least loaded does; among equals, who was chosen longest ago.
    """

    def __init__(self, num_owners: int, *, max_blocks: int, blocks_per_load: float) -> None:
        self.index = PrefixIndex(num_owners, max_blocks)
        self._blocks_per_load = blocks_per_load
        self._turns = [0] * num_owners
        self._num_turns = 0

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, float]) -> Choice:
        """The best of the owners in `loads`, of which there is at least one."""
        matched = {owner: self.index.matched(owner, keys) for owner in loads}

        def price(owner: int) -> tuple[float, int]:
            missing = len(keys) - matched[owner]
            return loads[owner] + missing / self._blocks_per_load, self._turns[owner]

        owner = min(loads, key=price)
        return Choice(owner, matched[owner])

    def record(self, owner: int, keys: Sequence[bytes]) -> None:
        """A request with these blocks is sent to the owner."""
        self._num_turns += 1
        self._turns[owner] = self._num_turns
        self.index.record(owner, keys)
