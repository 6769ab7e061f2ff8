"""What the encoder has made of images, as the scheduler sees it: which are kept, and for whom.

Only sizes are known here, in embeddings; the embeddings themselves lie with the workers, who do as
the plan says. An item is known by the hash of its content, so requests share it.

    referenced      a request that runs still needs it
    unreferenced    kept in case somebody asks for it again; the oldest goes where room is needed
    new             allocated since the last plan: the next one says that it is to be encoded

size  |  referenced  |  unreferenced  |  free  |
"""

from __future__ import annotations

from dataclasses import dataclass, field

Reference = tuple[str, int]
"""A request's id, and the place of the item among its features."""


@dataclass(slots=True)
class _Item:
    num_embeds: int
    references: dict[Reference, None] = field(default_factory=dict)
    """In the order in which they came."""


class EncoderCache:
    """Room for `size` embeddings."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._items: dict[str, _Item] = {}
        self._unreferenced: dict[str, None] = {}
        """The oldest first."""
        self._new: dict[str, None] = {}
        self._evicted: list[str] = []
        """Since the last plan."""
        self._num_referenced = 0
        self._num_unreferenced = 0

    @property
    def num_available(self) -> int:
        """Embeddings that no request needs, and room for others."""
        return self.size - self._num_referenced

    @property
    def num_new(self) -> int:
        """Embeddings that the next plan has encoded."""
        return sum(self._items[content_hash].num_embeds for content_hash in self._new)

    def is_kept(self, content_hash: str) -> bool:
        """Whether the item need not be encoded again."""
        return content_hash in self._items

    def is_referenced(self, content_hash: str) -> bool:
        """Whether it stays, whatever else is allocated."""
        return content_hash in self._items and content_hash not in self._unreferenced

    def add(self, content_hash: str, num_embeds: int, reference: Reference) -> bool:
        """Keep an item for a request; whether it was there. `num_available` must suffice."""
        was_kept = content_hash in self._items
        if not was_kept:
            self._make_room(num_embeds)
            self._items[content_hash] = _Item(num_embeds)
            self._new[content_hash] = None
        item = self._items[content_hash]
        if content_hash in self._unreferenced:
            del self._unreferenced[content_hash]
            self._num_unreferenced -= item.num_embeds
        if not item.references:
            self._num_referenced += item.num_embeds
        item.references[reference] = None
        return was_kept

    def remove(self, content_hash: str, reference: Reference) -> None:
        """A request does not need an item any more."""
        item = self._items[content_hash]
        del item.references[reference]
        if item.references:
            return
        self._num_referenced -= item.num_embeds
        if content_hash in self._new:  # nobody will encode it
            del self._new[content_hash], self._items[content_hash]
        else:
            self._unreferenced[content_hash] = None
            self._num_unreferenced += item.num_embeds

    def take_news(self) -> tuple[list[Reference], list[str]] | None:
        """What the next plan tells the workers: items to encode, each by one who needs it, and
        hashes of those to forget before that. None if that is nothing.
        """
        if not self._new and not self._evicted:
            return None
        new = [next(iter(self._items[content_hash].references)) for content_hash in self._new]
        evicted, self._evicted = self._evicted, []
        self._new.clear()
        return new, evicted

    def clear(self) -> None:
        """Forget all items that no request needs."""
        self._make_room(self.num_available)

    def audit(self) -> list[str]:
        """Everything that is wrong with the counts, in words."""
        problems = []
        referenced = {each for each, item in self._items.items() if item.references}
        if referenced & set(self._unreferenced) or (
            len(referenced) + len(self._unreferenced) != len(self._items)
        ):
            problems.append("items are neither referenced nor unreferenced, or both")
        sums = [
            sum(self._items[each].num_embeds for each in hashes)
            for hashes in (referenced, self._unreferenced)
        ]
        if sums != [self._num_referenced, self._num_unreferenced]:
            problems.append(
                f"counted {sums} embeddings, not {self._num_referenced} and"
                f" {self._num_unreferenced}"
            )
        if sum(sums) > self.size:
            problems.append(f"{sum(sums)} embeddings in room for {self.size}")
        return problems

    def _make_room(self, num_embeds: int) -> None:
        assert num_embeds <= self.num_available, "an item is allocated that does not fit"
        while self._num_referenced + self._num_unreferenced + num_embeds > self.size:
            oldest = next(iter(self._unreferenced))
            del self._unreferenced[oldest]
            self._num_unreferenced -= self._items.pop(oldest).num_embeds
            self._evicted.append(oldest)
