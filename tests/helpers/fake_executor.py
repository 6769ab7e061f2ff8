"""A scheduler on a device whose every step can be checked by hand.

`FakeExecutor` keeps rows and KV slots as a real worker does. Instead of K and V a slot holds the
digest of the whole token prefix up to its token, so that the executor can tell whether every slot
that a row reads belongs to the row's own prefix. The next token is a fixed function of that digest,
so that `generate_alone` knows what each request must bring, whatever else runs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helpers.images import embed_places, model_inputs
from tokenmill.contracts.plan import (
    CachedRequestData,
    EncoderWork,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenmill.contracts.request import EngineCoreRequest, FinishReason, TokenLogprobs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.encoder import NO_ENCODER, EncoderSchedule
from tokenmill.core.scheduler import Scheduler

VOCAB_SIZE = 1000
EOS = 2
BLOCK_SIZE = 4

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
