"""Many steps at once, where all that happens is that each running request gets a token.

The scheduler would plan each of them alike: the same requests, a token each, blocks where tables
grow. What it would have done to the requests and to the pool after `n` such steps can be done at
once. Blocks come from the same free list, in as large a number, and are freed in the same order, so
that hits and preemptions that follow are those that would have followed. That reports are the same
is tested (`tests/unit/simulate/test_cruise.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheKind
from tokenmill.core.request import Request
from tokenmill.core.scheduler import Scheduler
from tokenmill.simulate.requests import SAMPLED


@dataclass(slots=True)
class Cruise:
    """Steps that need no scheduler.

        ends        of the `num_in_flight` steps before it, then of its own
        planned     begin | ends[0] | ends[1] ...       when each of its steps is planned
        settled             ends[0] | ends[1] ...       what it settles, as many as it plans

    With one step at a time a step is planned when the one before it settles, with two in flight
    when the one before that does: either way with the next end.
    """

    begin: float
    ends: list[float]
    num_in_flight: int
    num_steps: int

    @classmethod
    def of(cls, begin: float, in_flight: Sequence[float], seconds: Sequence[float]) -> Cruise:
        """From the ends of the steps in flight, and what each further step takes."""
        ends = list(in_flight)
        for each in seconds:
            ends.append((ends[-1] if ends else begin) + each)
        return cls(begin, ends, len(in_flight), len(seconds))

    def stop_at(self, moment: float) -> None:
        """The first plan at or after `moment` has something to see: end before it."""
        num_before = 1 + bisect_left(self.ends, moment) if moment > self.begin else 0
        self.num_steps = min(self.num_steps, num_before)

    @property
    def end(self) -> float:
        """When the scheduler is needed again."""
        return self.ends[self.num_steps - 1] if self.num_steps else self.begin

    @property
    def settled(self) -> list[float]:
        """When its steps settle."""
        return self.ends[: self.num_steps]

    @property
    def in_flight(self) -> list[float]:
        """Ends of the steps in flight at its end."""
        return self.ends[self.num_steps : self.num_steps + self.num_in_flight]

    @property
    def busy_seconds(self) -> float:
        """What the steps that it plans take."""
        bounds = [self.begin, *self.ends]
        return bounds[self.num_in_flight + self.num_steps] - bounds[self.num_in_flight]


def can_skip_steps(cache: KVCacheConfig, num_speculative_tokens: int) -> bool:
    """Whether steps of such an engine can be alike: windows release blocks between them, and drafts
    hold or do not.
    """
    return not num_speculative_tokens and all(
        group.spec.kind is KVCacheKind.FULL for group in cache.groups
    )


def num_equal_steps(scheduler: Scheduler, num_groups: int, num_in_flight: int, most: int) -> int:
    """How many next steps, at most `most`, are alike if nothing comes and goes, with so many KV
    cache groups and steps in flight; 0 if the next one must be planned.

    The last step of a request is never among them.
    """
    requests = scheduler.running.values()
    if not requests or len(requests) > scheduler.config.max_num_batched_tokens:
        return 0
    fewest = most + 1
    for request in requests:
        num_expected = len(request.all_token_ids) + num_in_flight
        if (
            request.num_output_placeholders != num_in_flight
            or request.num_computed_tokens != num_expected - 1
            or request.num_settled_tokens != request.num_computed_tokens - num_in_flight
        ):
            return 0  # not all that is in flight, and comes, is a token for each
        fewest = min(fewest, request.max_num_tokens - num_expected)
    return _with_blocks(scheduler, requests, num_groups, fewest - 1)


def _with_blocks(
    scheduler: Scheduler, requests: Collection[Request], num_groups: int, num_steps: int
) -> int:
    """At most `num_steps`, so that no step lacks a block."""
    size, num_free = scheduler.kv.block_size, scheduler.kv.pool.num_free_blocks
    while num_steps > 0:
        missing = 0
        for request in requests:
            missing_slots = request.num_computed_tokens + num_steps - request.num_slots
            if missing_slots > 0:
                missing += -(-missing_slots // size)
        if missing * num_groups <= num_free:
            return num_steps
        num_steps //= 2
    return 0


def skip_steps(scheduler: Scheduler, num_steps: int) -> None:
    """Leave scheduler and pool as after so many equal steps, all planned and settled."""
    kv = scheduler.kv
    size, tokens = kv.block_size, [SAMPLED] * num_steps
    for request in scheduler.running.values():
        if request.num_computed_tokens + num_steps > request.num_slots:
            new_block_ids = kv.allocate_slots(request, num_steps)
            assert new_block_ids is not None, "there were blocks enough"
        request.all_token_ids += tokens
        request.num_computed_tokens += num_steps
        before = request.num_settled_tokens
        request.num_settled_tokens = before + num_steps
        if before // size != request.num_settled_tokens // size:
            kv.cache_blocks(request, request.num_settled_tokens)
    scheduler.plan_anew()
