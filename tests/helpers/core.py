"""A scheduler by hand, or in an engine core on a fake device, and what holds at every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from helpers.fake_executor import (
    BLOCK_SIZE,
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    NextToken,
    next_token_of_prefix,
)
from tokenmill.config.engine_config import SchedulerConfig
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.request import Request
from tokenmill.core.scheduler import Scheduler
from tokenmill.engine.core import EngineCore
from tokenmill.sampling_params import SamplingParams

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
    num_speculative_tokens: int = 0,
    num_lookahead_tokens: int | None = None,
    **kwargs: object,
) -> Scheduler:
    """A scheduler with small limits that verifies every prefix hit; `kwargs` go to it as well.

    Drafters write behind their tokens, by default as many slots as they have drafts.
    """
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
        num_speculative_tokens=num_speculative_tokens,
        num_lookahead_tokens=(
            num_speculative_tokens if num_lookahead_tokens is None else num_lookahead_tokens
        ),
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
