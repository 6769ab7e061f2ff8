"""A scheduler on a device whose every step can be checked by hand.

`FakeExecutor` keeps rows and KV slots as a real worker does. Instead of K and V a slot holds the
digest of the whole token prefix up to its token, so that the executor can tell whether every slot
that a row reads belongs to the row's own prefix. The next token is a fixed function of that digest,
so that `generate_alone` knows what each request must bring, whatever else runs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from helpers.images import embed_places, model_inputs
from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from tokenmill.contracts.plan import (
    CachedRequestData,
    EncoderWork,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.encoder import NO_ENCODER, EncoderSchedule
from tokenmill.core.request import Request
from tokenmill.core.scheduler import Scheduler
from tokenmill.engine.core import EngineCore
from tokenmill.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EOS = 2
BLOCK_SIZE = 4

_ids = itertools.count()


# ---- factories ----------------------------------------------------------------------------------


def create_kv_cache_config(
    num_blocks: int = 1000,
    block_size: int = BLOCK_SIZE,
    num_groups: int = 1,
    windows: Sequence[int | None] | None = None,
) -> KVCacheConfig:
    """`windows` has one for each group, None for one that keeps all; without it all do."""
    kinds = {False: KVCacheKind.FULL, True: KVCacheKind.SLIDING_WINDOW}
    groups = tuple(
        KVCacheGroup(
            (f"layer.{index}",), KVCacheSpec(1, 8, "float32", kinds[window is not None], window)
        )
        for index, window in enumerate(windows or [None] * num_groups)
    )
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups)


def create_scheduler(
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    long_prefill_token_threshold: int = 0,
    enable_chunked_prefill: bool = True,
    policy: str = "fcfs",
    max_steps_in_flight: int = 1,
    num_stages: int = 1,
    attention_cost: float = 0.0,
    shared_tokens: int = 0,
    num_blocks: int = 1000,
    block_size: int = BLOCK_SIZE,
    num_groups: int = 1,
    windows: Sequence[int | None] | None = None,
    enable_prefix_caching: bool = True,
    **kwargs: object,
) -> Scheduler:
    """A scheduler with small limits that verifies every prefix hit; `kwargs` go to it as well."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_chunked_prefill=enable_chunked_prefill,
        policy=policy,
        max_steps_in_flight=max_steps_in_flight,
        num_stages=num_stages,
        attention_cost=attention_cost,
        shared_tokens=shared_tokens,
    )
    return Scheduler(
        config,
        create_kv_cache_config(num_blocks, block_size, num_groups, windows),
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        verify_prefix_hits=True,
        **kwargs,
    )


def create_request(
    prompt: int | list[int] = 8,
    *,
    request_id: str | None = None,
    max_tokens: int = 4,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    logprobs: int | None = None,
    eos_token_id: int | None = EOS,
    arrival_time: float | None = None,
    **kwargs: object,
) -> EngineCoreRequest:
    """A request; `prompt` is its ids, or how many ids of its own it gets."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [
            3 + (number * 37 + position * 11) % (VOCAB_SIZE - 3) for position in range(prompt)
        ]
    return EngineCoreRequest(
        request_id=request_id or f"r{number}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=max(max_tokens, min_tokens),
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
            logprobs=logprobs,
        ),
        seed=0,
        max_tokens=max_tokens,
        arrival_time=float(number) if arrival_time is None else arrival_time,
        eos_token_id=eos_token_id,
        **kwargs,
    )


# ---- the model ----------------------------------------------------------------------------------

NextToken = Callable[[int], int]
"""From the digest of a prefix to the token that follows it."""


def start_digest(request: EngineCoreRequest | NewRequestData) -> int:
    """What KV depends on besides the tokens."""
    return 0 if request.adapter is None else zlib.crc32(request.adapter.load_id.encode())


def extend_digest(digest: int, seen: int) -> int:
    """`seen` is a token's id, or stands for an image's embedding."""
    return hash((digest, seen))


def digests_of(request: EngineCoreRequest | NewRequestData, token_ids: list[int]) -> list[int]:
    """Digest of the prefix that ends with each token."""
    seen = model_inputs(request, token_ids)
    digests = itertools.accumulate(seen, extend_digest, initial=start_digest(request))
    return list(digests)[1:]


def next_token_of_prefix(digest: int) -> int:
    """Any token, and the end token in one of 16 cases."""
    return EOS if digest % 16 == 0 else endless(digest)


def endless(digest: int) -> int:
    """Any token but the end token."""
    return 3 + digest % (VOCAB_SIZE - 3)


def prompt_logprob(digest: int, token_id: int) -> TokenLogprobs:
    """Stands for the log-probability of `token_id` after a prefix."""
    return TokenLogprobs([token_id], [-float(hash((digest, token_id)) % 997)], 1)


@dataclass
class Expected:
    """What one request must bring."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    prompt_logprobs: list[TokenLogprobs] | None


def generate_alone(
    request: EngineCoreRequest, scheduler: Scheduler, next_token: NextToken = next_token_of_prefix
) -> Expected:
    """Brute force: one request, token by token, without a cache. Written apart from the engine."""
    prompt = request.prompt_token_ids
    longest = min(scheduler.config.max_model_len, scheduler.kv.num_usable_tokens + 1)
    limit = min(request.max_tokens, longest - len(prompt))
    minimum = min(request.sampling_params.min_tokens, limit)
    output = list(request.initial_output_ids)
    logprobs = None
    if request.sampling_params.prompt_logprobs is not None:
        digests = digests_of(request, prompt)
        logprobs = [prompt_logprob(*pair) for pair in zip(digests, prompt[1:], strict=False)]
    while True:
        output.append(next_token(digests_of(request, prompt + output)[-1]))
        new = output[len(request.initial_output_ids) :]
        if len(output) >= minimum:
            if output[-1] == request.eos_token_id:
                return Expected(new, FinishReason.STOP, None, logprobs)
            if output[-1] in request.stop_token_ids:
                return Expected(new, FinishReason.STOP, output[-1], logprobs)
        if len(output) >= limit:
            return Expected(new, FinishReason.LENGTH, None, logprobs)


# ---- the device ---------------------------------------------------------------------------------


@dataclass
class Row:
    """What the device knows of one row."""

    data: NewRequestData
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed: int
    error: str | None = None
    """Set once it has failed; it then fails in every step until it is cleared."""


@dataclass
class FakeStep:
    """A finished step; `result` is what the engine waits for."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass
class FakeExecutor:
    """Runs plans in order and checks each against everything a device relies on."""

    block_size: int = BLOCK_SIZE
    max_slots: int = 0
    """Most slots of one sequence: lookahead ends there."""
    num_drafts: int = 0
    """Drafts proposed after each sample; about every fourth is wrong."""
    num_lookahead: int | None = None
    """Slots that the drafter writes ahead, by default as many. With 0 it finds drafts in the text:
    sometimes fewer, and sometimes none."""
    next_token: NextToken = next_token_of_prefix
    errors: dict[str, str] = field(default_factory=dict)
    """Requests to fail in their next step."""
    bad_tokens: dict[str, int] = field(default_factory=dict)
    """Requests whose next sample is replaced by this id."""
    rows: dict[int, Row] = field(default_factory=dict)
    windows: Sequence[int | None] = (None,)
    """Tokens that a query of each group sees, itself included."""
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(Group, digest) by (block, offset): groups share the memory."""
    encoder: EncoderSchedule = NO_ENCODER
    """Whose limits what is encoded must keep to."""
    encoded: dict[str, int] = field(default_factory=dict)
    """Number of embeddings by hash of the content."""
    num_encoded: int = 0
    plans: list[SchedulerOutput] = field(default_factory=list)
    num_shutdowns: int = 0
    _output: ModelRunnerOutput | None = None

    def execute_model(self, plan: SchedulerOutput) -> None:
        assert self._output is None, "sample_tokens was not called for the step before"
        assert plan.step_id == len(self.plans), "steps are numbered without gaps"
        self._check_repeated(plan)
        self.plans.append(plan)
        self._update_rows(plan)
        self._encode(plan)
        assert plan.total_num_scheduled_tokens > 0
        assert len(set(plan.rows)) == len(plan.rows) == len(plan.req_ids), "a row is there twice"
        output = ModelRunnerOutput(plan.step_id, list(plan.req_ids), [])
        for index in range(len(plan.req_ids)):
            output.sampled_token_ids.append(self._run_row(plan, index, output))
        self._output = output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> FakeStep:
        assert self._output is not None, "execute_model comes first"
        output, self._output = self._output, None
        return FakeStep(output)

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _check_repeated(self, plan: SchedulerOutput) -> None:
        if not plan.is_repeated:
            return
        last = self.plans[-1]
        assert (plan.req_ids, plan.rows) == (last.req_ids, last.rows)
        assert plan.num_scheduled_tokens == last.num_scheduled_tokens
        assert plan.finished_rows == plan.scheduled_new_reqs == []
        assert plan.draft_token_ids == {}
        assert plan.encoder is None
        assert plan.scheduled_cached_reqs == CachedRequestData()

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in plan.finished_rows:
            del self.rows[row]
        cached = plan.scheduled_cached_reqs
        for row, new_block_ids in zip(cached.rows, cached.new_block_ids, strict=True):
            for table, new in zip(self.rows[row].block_ids, new_block_ids, strict=True):
                table.extend(new)
        for row, token_ids in zip(cached.appended_rows, cached.appended_token_ids, strict=True):
            self.rows[row].token_ids.extend(token_ids)
        for data in plan.scheduled_new_reqs:
            assert data.row not in self.rows, "the row is taken"
            assert data.num_computed_tokens < len(data.token_ids), "a token is left to compute"
            assert data.num_computed_tokens % self.block_size == 0
            tables = tuple(list(table) for table in data.block_ids)
            self.rows[data.row] = Row(data, list(data.token_ids), tables, data.num_computed_tokens)

    def _encode(self, plan: SchedulerOutput) -> None:
        """Do what the plan says, which must be what the step needs and no more."""
        needed = set()
        for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
            places = embed_places(self.rows[row].data.mm_features)
            first = self.rows[row].num_computed
            seen = (places.get(position) for position in range(first, first + count))
            needed |= {place.split(":")[0] for place in seen if place is not None}
        work = plan.encoder or EncoderWork([], [])
        for content_hash in work.freed_hashes:
            del self.encoded[content_hash]
        features = [self.rows[row].data.mm_features[index] for row, index in work.items]
        new = {feature.content_hash: feature.num_embeds for feature in features}
        assert len(new) == len(features), "a content is encoded twice"
        assert new.keys() == needed - self.encoded.keys()
        assert len(new) < 2 or sum(new.values()) <= self.encoder.max_step_embeds
        self.encoded |= new
        self.num_encoded += len(new)
        assert sum(self.encoded.values()) <= self.encoder.cache.size

    def _run_row(self, plan: SchedulerOutput, index: int, output: ModelRunnerOutput) -> list[int]:
        """Compute one row's tokens; returns the sampled ones."""
        row, req_id = self.rows[plan.rows[index]], plan.req_ids[index]
        assert row.data.req_id == req_id
        if row.error is not None:
            output.errors[req_id] = row.error
            return []
        drafts = plan.draft_token_ids.get(req_id, [])
        known = row.token_ids + drafts
        start, end = row.num_computed, row.num_computed + plan.num_scheduled_tokens[index]
        assert start < end <= len(known), "tokens beyond what is known and drafted"
        assert not drafts or (start == len(row.token_ids) - 1 and end == len(known))
        is_sampled = end >= len(row.token_ids)
        assert plan.is_sampled[index] == is_sampled
        self._check_num_logits(plan, index, row, len(drafts))

        digests = digests_of(row.data, known[:end])
        self._write_and_read(row, digests, start, is_sampled)
        self._add_prompt_logprobs(row, digests, plan, index, output)
        row.num_computed = end
        row.error = self.errors.pop(req_id, None)
        if row.error is not None:
            output.errors[req_id] = row.error
            return []
        if not is_sampled:
            return []
        sampled = self._sample(digests, drafts, end)
        if req_id in self.bad_tokens:
            sampled[-1] = self.bad_tokens.pop(req_id)
        row.token_ids.extend(sampled)
        row.num_computed = end - (len(drafts) + 1 - len(sampled))
        if row.data.sampling_params.logprobs is not None:
            output.logprobs[req_id] = [TokenLogprobs([token], [-1.0], 1) for token in sampled]
        if self.num_drafts and min(sampled) >= 0:
            drafts = self._propose(row)
            if drafts:
                output.draft_token_ids[req_id] = drafts
        return sampled

    def _check_num_logits(
        self, plan: SchedulerOutput, index: int, row: Row, num_drafts: int
    ) -> None:
        allowed = {1 + num_drafts if plan.is_sampled[index] else 0}
        params, num_prompt = row.data.sampling_params, row.data.num_prompt_tokens
        if params.prompt_logprobs is not None and row.num_computed < num_prompt - 1:
            whole_chunk = plan.num_scheduled_tokens[index]
            if len(row.data.token_ids) > num_prompt:  # resumed: they may be delivered already
                allowed.add(whole_chunk)
            else:
                allowed = {whole_chunk}
        assert plan.num_logits[index] in allowed

    def _write_and_read(self, row: Row, digests: list[int], start: int, is_sampled: bool) -> None:
        writes_ahead = self.num_drafts if self.num_lookahead is None else self.num_lookahead
        lookahead = writes_ahead if is_sampled else 0
        for group, table in enumerate(row.block_ids):
            seen = self._blocks_seen(row, group)
            assert 0 not in seen, "a query sees the null block"
            assert len(seen) == len(set(seen))
            assert len(table) * self.block_size >= len(digests)
            for position in range(start, len(digests)):
                block = table[position // self.block_size]
                owners = sum(
                    block in self._blocks_seen(other, index)
                    for other in self.rows.values()
                    for index in range(len(row.block_ids))
                )
                assert owners == 1, f"block {block} is written while {owners} tables hold it"
                self.slots[block, position % self.block_size] = group, digests[position]
            for position in range(self._first_seen(group, start), len(digests)):
                slot = table[position // self.block_size], position % self.block_size
                kept = self.slots.get(slot)
                assert kept == (group, digests[position]), f"slot {slot} holds another prefix"
            room = len(table) * self.block_size - len(digests)
            assert room >= min(lookahead, self.max_slots - len(digests))

    def _first_seen(self, group: int, query: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(query - window + 1, 0)

    def _blocks_seen(self, row: Row, group: int) -> list[int]:
        """What the row's next query sees of its table; the device is not told what was released."""
        return row.block_ids[group][self._first_seen(group, row.num_computed) // self.block_size :]

    def _add_prompt_logprobs(
        self,
        row: Row,
        digests: list[int],
        plan: SchedulerOutput,
        index: int,
        output: ModelRunnerOutput,
    ) -> None:
        if row.data.sampling_params.prompt_logprobs is None:
            return
        first = len(digests) - plan.num_logits[index]
        last = min(len(digests), row.data.num_prompt_tokens - 1)
        entries = [
            prompt_logprob(digests[position], row.token_ids[position + 1])
            for position in range(first, last)
        ]
        if entries:
            output.prompt_logprobs[plan.req_ids[index]] = entries

    def _sample(self, digests: list[int], drafts: list[int], end: int) -> list[int]:
        """Check drafts one by one; the first that differs is replaced and ends the run."""
        sampled = []
        for position, draft in zip(range(end - len(drafts) - 1, end), [*drafts, None], strict=True):
            sampled.append(self.next_token(digests[position]))
            if sampled[-1] != draft:
                break
        return sampled

    def _propose(self, row: Row) -> list[int]:
        digest = digests_of(row.data, row.token_ids)[-1]
        drafts = []
        most = self.num_drafts
        if self.num_lookahead == 0:
            most = digest // 4 % (most + 1)
        for _ in range(most):
            token_id = self.next_token(digest)
            drafts.append(token_id if digest % 4 else 3)
            digest = extend_digest(digest, token_id)
        return drafts


# ---- by hand, without a device -------------------------------------------------------------------


def add(scheduler: Scheduler, *requests: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """Queue requests and return them."""
    for request in requests:
        scheduler.add_request(request)
    return requests


def planned(plan: SchedulerOutput) -> dict[str, int]:
    """Scheduled tokens by request."""
    return dict(zip(plan.req_ids, plan.num_scheduled_tokens, strict=True))


def settle(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    tokens: dict[str, list[int]] | None = None,
    **fields: object,
) -> dict[str, EngineCoreOutput]:
    """Settle a plan with these tokens by request, by default 9 for every sampled row."""
    sampled = [
        ([9] if tokens is None else tokens[req_id]) if is_sampled else []
        for req_id, is_sampled in zip(plan.req_ids, plan.is_sampled, strict=True)
    ]
    result = ModelRunnerOutput(plan.step_id, list(plan.req_ids), sampled, **fields)
    outputs = scheduler.update_from_output(plan, result)
    check_invariants(scheduler)
    return {output.request_id: output for output in outputs.outputs}


# ---- running and checking -----------------------------------------------------------------------


@dataclass
class Collected:
    """The outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    last: EngineCoreOutput | None = None


class Collector:
    """Joins outputs by request and checks that none comes after the end."""

    def __init__(self) -> None:
        self.requests: dict[str, Collected] = {}

    def add(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            collected = self.requests.setdefault(output.request_id, Collected())
            assert collected.last is None or not collected.last.finished, "output after the end"
            assert output.new_token_ids or output.finished, "an output that tells nothing"
            if output.prompt_logprobs is not None:
                assert not collected.token_ids, "prompt logprobs come with the first token"
                collected.prompt_logprobs = output.prompt_logprobs
            collected.token_ids += output.new_token_ids
            collected.logprobs += output.new_logprobs or []
            collected.last = output


def create_core(
    *, next_token: NextToken = next_token_of_prefix, num_drafts: int = 0, **kwargs: object
) -> tuple[EngineCore, FakeExecutor]:
    """An engine core on a fake device; `kwargs` as in `create_scheduler`."""
    scheduler = create_scheduler(num_speculative_tokens=num_drafts, **kwargs)
    executor = create_executor(scheduler, next_token=next_token, num_drafts=num_drafts)
    return EngineCore(scheduler, executor, scheduler.config.max_steps_in_flight), executor


def create_executor(scheduler: Scheduler, **kwargs: object) -> FakeExecutor:
    """A fake device for this scheduler's pool."""
    max_slots = min(scheduler.config.max_model_len, scheduler.kv.num_usable_tokens)
    windows = [group._group.spec.sliding_window for group in scheduler.kv._groups]
    return FakeExecutor(
        block_size=scheduler.kv.block_size,
        max_slots=max_slots,
        windows=windows,
        encoder=scheduler.encoder,
        **kwargs,
    )


def run_to_end(core: EngineCore, max_steps: int = 10_000) -> Collector:
    """Step until nothing is left, checking the scheduler after each step."""
    collector = Collector()
    for _ in range(max_steps):
        if not core.has_requests():
            check_idle(core.scheduler)
            return collector
        collector.add(core.step().outputs)
        check_invariants(core.scheduler)
    raise AssertionError(f"not done after {max_steps} steps")


def check_invariants(scheduler: Scheduler) -> None:
    """What holds after every step."""
    assert scheduler.kv.audit() == []
    assert scheduler.encoder.audit() == []
    running = list(scheduler.running.values())
    rows = [request.row for request in running]
    assert None not in rows
    assert len(rows) == len(set(rows)) <= scheduler.config.max_num_seqs
    assert len(running) + len(scheduler.waiting) == len(scheduler.requests)
    for request in scheduler.requests.values():
        if request.is_running:
            _check_counters(request)
        else:  # a waiting request holds nothing but its tokens
            assert request.row is None
            assert request.num_computed_tokens == request.num_settled_tokens == 0
            assert request.num_output_placeholders == 0
            assert request.draft_token_ids == []


def _check_counters(request: Request) -> None:
    assert 0 <= request.num_settled_tokens <= request.num_computed_tokens
    assert request.num_computed_tokens <= request.num_expected_tokens
    assert request.num_tokens < request.num_prompt_tokens + request.max_tokens
    if not request.num_steps_in_flight:
        assert request.num_output_placeholders == 0
        assert request.num_settled_tokens == request.num_computed_tokens < request.num_tokens


def check_idle(scheduler: Scheduler) -> None:
    """What holds when no request is left."""
    check_invariants(scheduler)
    assert not scheduler.requests
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    assert scheduler.encoder.cache.num_available == scheduler.encoder.cache.size
    pool = scheduler.kv.pool
    assert pool.num_used_blocks == 0
    assert all(block.ref_count == 0 for block in pool.blocks)
    assert sorted(pool.free_block_ids()) == list(range(1, pool.num_blocks))
