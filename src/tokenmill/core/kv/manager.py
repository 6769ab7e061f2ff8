"""What the scheduler asks of the KV cache: hits, slots, caching, release."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.kv_events import EventSink
from tokenmill.contracts.plan import BlockIds
from tokenmill.contracts.seams import KVTransfer
from tokenmill.core.kv.block_pool import BlockPool, KVCacheBlock
from tokenmill.core.kv.events import KVEvents, NoKVEvents
from tokenmill.core.kv.groups import build_groups
from tokenmill.core.kv.hashing import (
    PROCESS_ROOT,
    BlockHasher,
    ChainedBlockHasher,
    NoBlockHasher,
)
from tokenmill.core.kv.no_transfers import NoTransfers
from tokenmill.core.kv.transfers import KVTransfers
from tokenmill.core.kv.verify import CompareTokens, TrustHashes
from tokenmill.core.request import Request

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 2.0
"""How long forgetting all prefixes waits for blocks that are being saved."""


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Cached blocks that begin a request's sequence. Nothing is held until slots are allocated."""

    blocks: tuple[list[KVCacheBlock], ...] = ()
    """One list per KV cache group, all equally long; no lists if nothing was looked up."""
    num_tokens: int = 0
    """Tokens in these blocks, the same in every group."""
    num_queried_tokens: int = 0
    """Tokens that were looked up; 0 if the request may not read the cache."""

    @property
    def num_blocks(self) -> int:
        """Hits in each group."""
        return len(self.blocks[0]) if self.blocks else 0


NO_COMPUTED_BLOCKS = ComputedBlocks()


class KVCacheManager:
    """Block tables of all running requests, over one pool.

    `verify_hits` is the debug mode that compares tokens on every hit.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool,
        max_step_tokens: int,
        verify_hits: bool = False,
        transfer: KVTransfer | None = None,
    ) -> None:
        """A step computes at most `max_step_tokens` tokens of a request, lookahead slots before
        and behind them included. With `transfer`, KV comes from outside as well.
        """
        self.block_size = config.block_size
        sizes = {False: config.num_blocks, True: config.num_state_blocks}
        kinds = sorted({group.keeps_states for group in config.groups})
        pools = {keeps_states: BlockPool(sizes[keeps_states]) for keeps_states in kinds}
        self._pools = tuple(pools.values())
        self.pool = self._pools[0]
        """Blocks of KV; of states, where nothing else is kept."""
        self.state_pool = pools.get(True)
        """Those of states."""
        make_verifier = partial(CompareTokens, self.block_size) if verify_hits else TrustHashes
        self._groups = build_groups(config, pools, make_verifier, max_step_tokens)
        self._no_new_blocks: BlockIds = tuple([] for _ in self._groups)
        self._enable_prefix_caching = enable_prefix_caching
        self._hasher: BlockHasher = (
            ChainedBlockHasher(self.block_size, PROCESS_ROOT if transfer is None else transfer.root)
            if enable_prefix_caching
            else NoBlockHasher()
        )
        self.num_usable_tokens = config.longest_sequence(max_model_len, max_step_tokens)
        """Tokens of one sequence that fit the context and, alone, the pool."""
        self._num_queried_tokens = self._num_hit_tokens = 0
        """Of requests when they were first admitted; what was brought from outside for one is no
        hit of it."""
        self.transfers: KVTransfers | NoTransfers = NoTransfers()
        """What comes from outside and goes there."""
        self.events: KVEvents | NoKVEvents = NoKVEvents()
        if transfer is not None:
            self.transfers = KVTransfers(self, self._groups, self._pools, transfer)

    def report_to(self, sink: EventSink) -> None:
        """Have it told which blocks come into the prefix cache and go out of it."""
        self.events = KVEvents(self._groups, self.block_size, sink)

    def counts(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        return {
            "num_used_blocks": self.pool.num_used_blocks,
            "num_blocks": self.pool.num_usable_blocks,
            "prefix_cache_queries": self._num_queried_tokens,
            "prefix_cache_hits": self._num_hit_tokens,
            **self.transfers.counts(),
        }

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a request that holds no blocks.

        At least the last token is left to be computed, since its logits are needed. A request
        that is owed prompt log-probabilities reads nothing: it needs the logits of all its prompt.
        Nor does one that asked not to.
        """
        is_owed = request.pending_prompt_logprobs is not None
        if not self._enable_prefix_caching or is_owed or not request.reads_prefix_cache:
            return NO_COMPUTED_BLOCKS
        self._hasher.extend(request)
        max_blocks = (request.num_tokens - 1) // self.block_size
        blocks = self._find_longest_hit(request, max_blocks)
        return ComputedBlocks(
            blocks=blocks,
            num_tokens=len(blocks[0]) * self.block_size,
            num_queried_tokens=request.num_tokens,
        )

    def find_prefix(self, request: Request, num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """Cached blocks for the beginning of the request's first `num_tokens` tokens, as many as a
        request with these could go on behind.
        """
        return self._find_longest_hit(request, num_tokens // self.block_size)

    def _find_longest_hit(
        self, request: Request, max_blocks: int
    ) -> tuple[list[KVCacheBlock], ...]:
        """What all groups have; a shorter hit of one is looked up again in the others."""
        while True:
            hits = tuple(group.find_longest_hit(request, max_blocks) for group in self._groups)
            shortest = min(map(len, hits))
            if shortest == max(map(len, hits)):
                return hits
            max_blocks = shortest

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks = NO_COMPUTED_BLOCKS,
        num_lookahead_tokens: int = 0,
        num_must_fit: int = 0,
    ) -> BlockIds | None:
        """Slots for a request's next tokens.

            | table so far  or  hits in `computed` | new blocks .......................... |
            | computed tokens                      | num_new_tokens | num_lookahead_tokens |

        New tokens include drafts; lookahead slots are where a drafter writes, and end where the
        longest sequence ends. Hits are for a request that holds nothing yet. With `num_must_fit`
        a sequence of so many tokens must fit, though blocks are taken for the new ones only.

        Returns the blocks appended to the table, hits not among them, one list per group (shared
        and empty if there are none); or None, with nothing taken, if too few blocks are free.
        Blocks that windows have passed are released first; lookahead slots may be taken back.
        """
        request_id = request.request_id
        num_computed_tokens = request.num_computed_tokens + computed.num_tokens
        num_slots = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        # Null blocks count, so a request's tables are equally long in all groups.
        table_length = self._groups[0].table_length(request_id) + computed.num_blocks
        num_missing = self._num_blocks(num_slots) - table_length
        if num_missing <= 0:  # never with hits: at least the last token is beyond them
            return self._no_new_blocks
        for group in self._groups:
            group.release_passed(request_id, num_computed_tokens - num_lookahead_tokens)
        if not self._has_free_blocks(request_id, num_missing, num_must_fit, computed):
            return None
        request.num_slots = (table_length + num_missing) * self.block_size
        for group, hits in zip(self._groups, computed.blocks, strict=False):
            group.append_hits(request_id, hits)
        return tuple(group.append_new(request_id, num_missing) for group in self._groups)

    def has_room_for(self, request: Request) -> bool:
        """Whether the tokens of a request that holds nothing would fit now, hits not counted."""
        return self._has_free_blocks(request.request_id, 0, request.num_tokens, NO_COMPUTED_BLOCKS)

    def record_admission(self, request: Request, computed: ComputedBlocks, now: float) -> None:
        """Note that a request is admitted for the first time, and what was found for it."""
        request.first_scheduled_time = now
        request.num_cached_tokens = computed.num_tokens
        request.num_external_tokens = min(request.num_external_tokens, computed.num_tokens)
        self._num_queried_tokens += computed.num_queried_tokens
        self._num_hit_tokens += computed.num_tokens - request.num_external_tokens

    def request_finished(self, request: Request, *, is_last: bool) -> None:
        """A request has ended and holds no blocks; with `is_last`, nobody else does."""
        self.transfers.request_finished(request)
        if is_last:
            self.repair_leak()

    def block_ids(self, request: Request) -> BlockIds:
        """The request's block tables, one per group."""
        return tuple(group.block_ids(request.request_id) for group in self._groups)

    def cache_blocks(self, request: Request, num_settled_tokens: int) -> None:
        """Make full blocks of settled tokens findable; drafts and tokens in flight never are."""
        num_full = min(num_settled_tokens, request.num_tokens) // self.block_size
        if len(request.block_hashes) < num_full:
            self._hasher.extend(request)
        num_hashed = min(num_full, len(request.block_hashes))
        for group in self._groups:
            group.cache_blocks(request, num_hashed)

    def forget(self, request: Request) -> None:
        """Make a request's blocks unfindable: what they hold is in doubt."""
        for group in self._groups:
            group.forget(request.request_id)

    def free(self, request: Request) -> None:
        """Release all blocks of a request; may be repeated. Cached contents stay findable.

        Steps in flight may still use the blocks: workers run steps in order, so whoever gets a
        block next writes it after them.
        """
        request.num_slots = 0
        for group in self._groups:
            group.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while any request holds blocks."""
        if self._are_in_transfers_only():
            self.transfers.flush(_FLUSH_SECONDS)
        if any(pool.num_used_blocks for pool in self._pools):
            return False
        is_reset = all(pool.reset_prefix_cache() for pool in self._pools)
        self.events.flush()
        return is_reset

    def audit(self) -> list[str]:
        """Everything that is wrong with counts, tables and lists, in words."""
        return [
            problem
            for pool in self._pools
            for problem in pool.audit(
                chain(
                    (t for group in self._groups if group.pool is pool for t in group.tables),
                    self.transfers.tables(pool),
                )
            )
        ]

    def repair_leak(self) -> None:
        """To be called when no request runs: blocks still in use then are logged and recovered."""
        if self._are_in_transfers_only():
            return
        if self.transfers.is_busy or self.transfers.holds_blocks:
            return  # seen again once nothing is under way
        logger.error("KV blocks leaked, rebuilding the pool: %s", "; ".join(self.audit()))
        for pool in self._pools:
            pool.rebuild()

    def _are_in_transfers_only(self) -> bool:
        """Whether nothing but transfers holds blocks; also if nothing does."""
        return all(
            pool.num_used_blocks
            == len({block.block_id for table in self.transfers.tables(pool) for block in table})
            for pool in self._pools
        )

    def _has_free_blocks(
        self, request_id: str, num_missing: int, num_must_fit: int, computed: ComputedBlocks
    ) -> bool:
        """Whether each pool has the missing blocks, and all that the sequence will hold."""
        if not num_must_fit and not computed.blocks:  # as a request decodes
            num_most = num_missing * len(self._groups)
            if all(num_most <= pool.num_free_blocks for pool in self._pools):
                return True
        num_must_fit = min(num_must_fit, self.num_usable_tokens)
        num_free = {id(pool): pool.num_free_blocks for pool in self._pools}
        for index, group in enumerate(self._groups):
            hits = computed.blocks[index] if computed.blocks else []
            num_held = group.num_held(request_id) + group.num_kept(hits)
            num_needed = group.blocks_needed(num_must_fit) - num_held
            taken = max(group.num_new(num_missing), num_needed) + group.num_free_hits(hits)
            num_free[id(group.pool)] -= taken
        return min(num_free.values()) >= 0

    def _num_blocks(self, num_slots: int) -> int:
        """Length of a table with so many slots."""
        return -(-min(num_slots, self.num_usable_tokens) // self.block_size)
