"""What a rank has of something that is divided: rows or columns of a matrix, heads, experts' sizes.

    rank          0       1       2       3
    q heads 8     0 1     2 3     4 5     6 7
    kv heads 2    0       0       1       1

Where there are fewer heads than ranks, several ranks have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_ALIGNMENT = 32
"""Tokens of a vocabulary that stay together: a panel of a packed weight."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of `total` things those from `start` up to `stop`."""

    total: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def of(self, size: int) -> Share:
        """The same, each of them being `size` smaller things: the rows of heads."""
        return Share(self.total * size, self.start * size, self.stop * size)


def even_share(total: int, rank: int, num_ranks: int) -> Share:
    """An equal part of `total` things, which are a multiple of the ranks."""
    assert total % num_ranks == 0, "settings that cannot be divided are refused before"
    size = total // num_ranks
    return Share(total, rank * size, (rank + 1) * size)


def kv_head_share(num_kv_heads: int, rank: int, num_ranks: int) -> Share:
    """An equal part of the heads, or one of them if there are fewer than ranks."""
    if num_kv_heads >= num_ranks:
        return even_share(num_kv_heads, rank, num_ranks)
    assert num_ranks % num_kv_heads == 0, "settings that cannot be divided are refused before"
    head = rank * num_kv_heads // num_ranks
    return Share(num_kv_heads, head, head + 1)


def vocab_parts(vocab_size: int, num_ranks: int) -> list[range]:
    """Tokens of each rank, in whole panels; the last one has what is left."""
    num_panels = -(-vocab_size // VOCAB_ALIGNMENT)
    bounds = [rank * num_panels // num_ranks * VOCAB_ALIGNMENT for rank in range(num_ranks)]
    return [range(*each) for each in zip(bounds, [*bounds[1:], vocab_size], strict=True)]
