"""Prefixes that come from outside the pool, and blocks that go there.

load    wait_reason: a prefix is found outside -> blocks are taken, the request waits
        step_settled: no step in flight can still write to them -> KVTransfer.load
        poll: copied -> the blocks are cached like computed ones, and nobody's
        the request starts: it finds them as any cached prefix
save    nobody holds a cached block any more -> held while it is copied (`saves.py`)
hold    request_finished: a prompt computed for another engine -> held until that has fetched it

So a request that waits holds nothing: it may be aborted, or its time may end, and what was under
way for it serves the next one. A job always ends, and with it what it holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tokenmill.contracts.kv_transfer import (
    BlockCopy,
    RemoteOrigin,
    Transferred,
    remote_origin,
    wants_remote_decode,
)
from tokenmill.contracts.seams import KVTransfer
from tokenmill.core.kv.block_pool import BlockKey, BlockPool, KVCacheBlock, block_key
from tokenmill.core.kv.groups import FullAttentionGroup
from tokenmill.core.kv.saves import HeldBlocks, Saves
from tokenmill.core.request import Request, RequestStatus

if TYPE_CHECKING:
    from tokenmill.core.kv.manager import KVCacheManager

logger = logging.getLogger(__name__)

WAIT_REASON = "KV transfer"
_WAIT_SECONDS = 0.005
"""For a job to finish, where nothing else can be done."""
_FLUSH_SECONDS = 10.0
"""How long the end of an engine waits for blocks that are being saved."""
_MOST_HELD = 0.75
"""Of a pool, for other engines: they may be gone, and requests come all the same."""
_ENDED_WELL = (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOPPED)


@dataclass(frozen=True, slots=True)
class _Place:
    """A block of a request's sequence in one group."""

    group: FullAttentionGroup
    position: int
    block: KVCacheBlock
    key: BlockKey

    @property
    def copy(self) -> BlockCopy:
        return BlockCopy(self.key, self.group.index, self.block.block_id)


@dataclass(slots=True)
class _Load(HeldBlocks):
    """A prefix on its way in. Hits in the pool are held beside it, so that they stay."""

    request: Request
    places: list[_Place]
    blocks: range
    """Of the request's sequence: what the pool lacks of the prefix."""
    origin: RemoteOrigin | None
    fence: int
    """Steps that must have settled before a block may be written."""


@dataclass(slots=True)
class _Visit:
    """A request's stay among those that wait; preemption begins another one."""

    number: int
    job_id: int | None = None
    """Of the load that it waits for; None if there is none."""
    looks_again: bool = False
    """Whether it is another request's load, behind which there may be something left to load."""


class KVTransfers:
    """Jobs between the pool and a `KVTransfer`.

    A request whose KV could not be loaded computes what is missing, or ends with an error where the
    transfer says so. It is a `ReadinessRule` as well.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        groups: Sequence[FullAttentionGroup],
        pools: Sequence[BlockPool],
        transfer: KVTransfer,
    ) -> None:
        self._kv = manager
        self._groups = groups
        self._block_size = manager.block_size
        self._transfer = transfer
        self._visits: dict[str, _Visit] = {}
        self._loads: dict[int, _Load] = {}
        self._unfenced: list[int] = []
        """Loads that wait for steps in flight."""
        self._loading: dict[BlockKey, int] = {}
        """Loads by their blocks."""
        self._holds: dict[int, HeldBlocks] = {}
        """Blocks of finished requests, for other engines."""
        self._next_job_id = 0
        self._saves = Saves(pools, transfer, self._new_id)
        self._num_submitted = self._num_settled = 0
        self._failures: list[tuple[str, str]] = []
        self._num_queried = self._num_hits = 0
        """Tokens looked up outside, and those of them that were loaded."""
        self._is_closed = False

    # ---- requests that wait ---------------------------------------------------------------

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """It is the same in every pass."""

    def wait_reason(self, request: Request) -> str | None:
        """Looks outside once in each of the request's stays among those that wait."""
        visit = self._visits.get(request.request_id)
        if visit is not None and visit.job_id in self._loads:
            return WAIT_REASON
        if visit is None or visit.looks_again or visit.number != request.num_preemptions:
            if not self._kv.has_room_for(request):
                return None  # nor can it start; it is looked for when there is room
            visit = self._visits[request.request_id] = self._begin_load(request)
        return WAIT_REASON if visit.job_id in self._loads else None

    def _begin_load(self, request: Request) -> _Visit:
        """Take blocks for what is found outside, unless another request has it loaded already."""
        visit = _Visit(request.num_preemptions)
        origin = None if request.num_preemptions else remote_origin(request.data.kv_transfer_params)
        if origin is None and not self._transfer.keeps_blocks:
            return visit
        computed = self._kv.get_computed_blocks(request)
        end = 0
        if computed.num_queried_tokens:  # else it may not read the cache
            end = self._find_end(request, computed.num_blocks, origin)
        num_queried = computed.num_queried_tokens - computed.num_tokens
        if end <= computed.num_blocks:
            if origin is not None:
                self._transfer.release(origin)
            self._num_queried += num_queried
            return visit
        wanted = [
            (group, position, group.cached_block(request, position))
            for group in self._groups
            for position in group.positions_needed(end)
        ]
        missing = (self._key(request, g, position) for g, position, block in wanted if not block)
        others = (self._loading[key] for key in missing if key in self._loading)
        visit.job_id = next(others, None)
        if visit.job_id is not None:
            visit.looks_again = True
        else:
            self._num_queried += num_queried
            gained = range(computed.num_blocks, end)
            visit.job_id = self._take_blocks(request, wanted, gained, origin)
        return visit

    def _take_blocks(
        self,
        request: Request,
        wanted: Sequence[tuple[FullAttentionGroup, int, KVCacheBlock | None]],
        gained: range,
        origin: RemoteOrigin | None,
    ) -> int:
        """Hold the blocks of a prefix that the pool has, and others for those that it lacks."""
        held: list[tuple[BlockPool, KVCacheBlock]] = []
        places: list[_Place] = []
        for group, _, block in wanted:  # first, so that none of them is handed out below
            if block is not None:
                group.pool.touch([block])
                held.append((group.pool, block))
        for group, position, block in wanted:
            if block is None:
                (block,) = group.pool.get_new_blocks(1)
                held.append((group.pool, block))
                places.append(_Place(group, position, block, self._key(request, group, position)))
        job_id = self._new_id()
        self._loading.update((place.key, job_id) for place in places)
        self._loads[job_id] = _Load(held, request, places, gained, origin, self._num_submitted)
        self._unfenced.append(job_id)
        return job_id

    def _key(self, request: Request, group: FullAttentionGroup, position: int) -> BlockKey:
        return block_key(request.block_hashes[position], group.index)

    def _find_end(self, request: Request, start: int, origin: RemoteOrigin | None) -> int:
        """Blocks of the longest prefix that can be had, given `start` of them in the pool."""
        num_remote = 0 if origin is None else origin.num_blocks
        known: dict[tuple[int, int], bool] = {}

        def is_there(group: FullAttentionGroup, position: int) -> bool:
            place = group.index, position
            if place not in known:
                known[place] = (
                    position < num_remote
                    or group.cached_block(request, position) is not None
                    or self._transfer.has(self._key(request, group, position))
                )
            return known[place]

        end = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        for group in self._groups:
            if group.keeps_all:
                gaps = (p for p in range(start, end) if not is_there(group, p))
                end = next(gaps, end)
        while end > start:
            gaps = (
                position
                for group in self._groups
                if not group.keeps_all
                for position in group.positions_needed(end)
                if not is_there(group, position)
            )
            gap = max(gaps, default=None)
            if gap is None:
                return end
            end = gap
        return start

    def request_finished(self, request: Request) -> None:
        """A request has ended, in whatever state, and holds no blocks."""
        visit = self._visits.pop(request.request_id, None)
        params = request.data.kv_transfer_params
        if visit is None or visit.looks_again:  # else its origin has been asked, or told
            origin = remote_origin(params)
            if origin is not None:
                self._transfer.release(origin)
        if wants_remote_decode(params) and request.status in _ENDED_WELL:
            request.kv_transfer_params = self._hold(request)

    def _hold(self, request: Request) -> dict[str, Any]:
        """Hold the blocks of a prompt, which are cached and nobody's; what to answer."""
        prefix = self._kv.find_prefix(request, request.num_prompt_tokens - 1)
        if not all(map(self._may_hold, self._groups, prefix)):
            logger.warning("KV transfer: too many blocks wait for other engines to hold more")
            prefix = tuple([] for _ in self._groups)
        held: list[tuple[BlockPool, KVCacheBlock]] = []
        copies: list[BlockCopy] = []
        for group, blocks in zip(self._groups, prefix, strict=True):
            for position, block in enumerate(blocks):
                if block is not group.pool.null_block:
                    group.pool.touch([block])
                    held.append((group.pool, block))
                    key = self._key(request, group, position)
                    copies.append(BlockCopy(key, group.index, block.block_id))
        job_id = self._new_id()
        self._holds[job_id] = HeldBlocks(held)
        params = self._transfer.hold(job_id, request.request_id, copies)
        ids = [[block.block_id for block in blocks] for blocks in prefix]
        return {**params, "remote_block_ids": ids if len(ids) > 1 else ids[0]}

    def _may_hold(self, group: FullAttentionGroup, blocks: Sequence[KVCacheBlock]) -> bool:
        """Whether enough of the pool is left for requests if these blocks are held as well."""
        held = chain.from_iterable(job.held for job in self._holds.values())
        num_held = sum(pool is group.pool for pool, _ in held)
        return num_held + len(blocks) <= _MOST_HELD * group.pool.num_usable_blocks

    # ---- jobs -----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being loaded or saved, or something else has to be settled."""
        return bool(
            self._loads or self._saves.is_busy or self._failures or self._transfer.has_finished()
        )

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks wait for another engine: it must be looked at now and then."""
        return bool(self._holds)

    def step_submitted(self) -> None:
        """One more step is in flight."""
        self._num_submitted += 1

    def step_settled(self) -> None:
        """The oldest step in flight is done with its blocks."""
        self._num_settled += 1

    def poll(self) -> None:
        """Settle what has finished, and begin what may begin."""
        if self._transfer.has_finished():
            for done in self._transfer.take_finished():
                self._settle(done)
        if self._unfenced:
            self._start_loads()
        self._saves.begin()

    def _start_loads(self) -> None:
        """Begin those whose blocks no step in flight can still write to."""
        ready = [i for i in self._unfenced if self._loads[i].fence <= self._num_settled]
        for job_id in ready:
            self._unfenced.remove(job_id)
            load = self._loads[job_id]
            self._transfer.load(job_id, [place.copy for place in load.places], load.origin)

    def _settle(self, done: Transferred) -> None:
        if (load := self._loads.pop(done.job_id, None)) is not None:
            self._settle_load(load, done)
        elif (hold := self._holds.pop(done.job_id, None)) is not None:
            hold.free()
        else:
            self._saves.settle(done)

    def _settle_load(self, load: _Load, done: Transferred) -> None:
        """Cache what has come; the request's tokens are the same whether or not it still lives."""
        if done.error is not None:
            logger.warning("KV transfer: %s", done.error)
        request = load.request
        end = load.blocks.stop
        for place in load.places:
            del self._loading[place.key]
            if place.key in done.copied:
                place.group.cache_block(request, place.position, place.block)
            else:
                end = min(end, place.position)
        num_tokens = max(end - load.blocks.start, 0) * self._block_size
        self._num_hits += num_tokens
        if request.first_scheduled_time is None:  # as the hits in the pool are counted
            request.num_external_tokens = num_tokens
        load.free()
        if self._transfer.fails_requests and end < load.blocks.stop and not request.is_finished:
            why = done.error or "blocks were not there any more"
            self._failures.append(
                (request.request_id, f"The KV of the prompt could not be loaded: {why}")
            )

    def wait(self) -> None:
        """While a request waits for nothing else, wait a moment for a job to finish."""
        if self._loads or self._holds or self._saves.is_busy:
            self._transfer.wait(_WAIT_SECONDS)

    def take_failures(self) -> list[tuple[str, str]]:
        """Requests that are to end since their KV could not be loaded, and why."""
        failures, self._failures = self._failures, []
        return failures

    def tables(self, pool: BlockPool) -> Iterable[Sequence[KVCacheBlock]]:
        """Blocks of a pool that jobs hold."""
        for job in chain(self._loads.values(), self._holds.values(), self._saves.jobs.values()):
            yield [block for owner, block in job.held if owner is pool]

    def flush(self, seconds: float) -> None:
        """Let what is being saved be saved, and begin nothing."""
        end = time.monotonic() + seconds
        while self._saves.is_busy and time.monotonic() < end:
            self.poll()
            self._transfer.wait(_WAIT_SECONDS)
        self.poll()

    def counts(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        return {
            "external_prefix_cache_queries": self._num_queried,
            "external_prefix_cache_hits": self._num_hits,
        }

    def shutdown(self) -> None:
        """Save what is to be saved, and end; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.flush(_FLUSH_SECONDS)
        self._transfer.shutdown()

    def _new_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id
