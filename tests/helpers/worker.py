"""A toy model whose logits follow by hand from the token prefix, and a host that plans for it.

The paged cache holds token ids. A token's hidden state is a checksum of the whole prefix, read back
through the block table, so that one wrong slot, position or row changes everything behind it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from helpers.sampling import edited, new_request, sample
from tokenmill.attention.backend import CommonAttentionMetadata
from tokenmill.attention.forward_context import get_attention_metadata
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from tokenmill.contracts.plan import NewRequestData, SchedulerOutput
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.drafts import Drafter
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.worker import Worker

VOCAB_SIZE = 97
NAN_TOKEN = 90
"""Logits are NaN once it stands in the prefix."""
ERROR_TOKEN = 91
"""The forward pass raises once it stands in the prefix."""
MEMORY_TOKEN = 92
INTERRUPT_TOKEN = 93
"""Ctrl-C is pressed while a prefix with it is computed, as often as `ToyModel.num_interrupts`."""
FIRST_BAD_TOKEN = 90
LAYER = "layer.0"


def toy_logits(prefix: Sequence[int]) -> np.ndarray:
    """float32 [VOCAB_SIZE]; tokens that do harm are never likely."""
    return _logits_of(zlib.crc32(np.array(prefix, np.int64).tobytes()))


def _logits_of(checksum: int) -> np.ndarray:
    logits = 2 * np.random.default_rng(checksum).standard_normal(VOCAB_SIZE)
    logits[FIRST_BAD_TOKEN:] = -30
    return logits.astype(np.float32)


class ToyBuilder:
    """Metadata is what the runner says of the batch."""

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


class ToyModel:
    """A `CausalLM`; `seen` records each batch, `num_logits_rows` each slab."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # What recycled blocks hold is some other request's.
        self.cache = torch.randint(VOCAB_SIZE, (num_blocks, block_size))
        self.seen: list[tuple[list[int], CommonAttentionMetadata]] = []
        self.num_logits_rows: list[int] = []
        self.num_interrupts = 0

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.unsqueeze(1)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        common = get_attention_metadata(LAYER)
        assert isinstance(common, CommonAttentionMetadata)
        self.seen.append((input_ids.tolist(), common))
        self.cache.view(-1)[common.slot_mapping] = input_ids.long()
        hidden = []
        for req in range(common.num_reqs):
            start, end = common.query_start_loc[req : req + 2].tolist()
            length = int(common.seq_lens[req])
            prefix = self.cache[common.block_table[req].long()].flatten().tolist()[:length]
            assert positions[start:end].tolist() == list(range(length - (end - start), length))
            hidden += [self._checksum(prefix[: p + 1]) for p in positions[start:end].tolist()]
        return torch.tensor(hidden).unsqueeze(1)

    def _checksum(self, prefix: list[int]) -> int:
        if INTERRUPT_TOKEN in prefix and self.num_interrupts:
            self.num_interrupts -= 1
            raise KeyboardInterrupt
        if ERROR_TOKEN in prefix:
            raise RuntimeError("a kernel broke")
        if MEMORY_TOKEN in prefix:
            raise MemoryError
        if NAN_TOKEN in prefix:
            return -1
        return zlib.crc32(np.array(prefix, np.int64).tobytes())

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.num_logits_rows.append(len(hidden_states))
        nan = np.full(VOCAB_SIZE, np.nan, np.float32)
        rows = [nan if h < 0 else _logits_of(h) for h in hidden_states.flatten().tolist()]
        return torch.from_numpy(np.stack(rows))

    def attention_layers(self) -> Mapping[str, Any]:
        return {}


def make_worker(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 4096,
    max_model_len: int = 256,
    block_size: int = 4,
    num_blocks: int = 200,
    drafter: Drafter | None = None,
    kind: type[ModelRunner] = ModelRunner,
) -> tuple[Worker, ToyModel]:
    model = ToyModel(num_blocks, block_size)
    limits = RunnerLimits(
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size, VOCAB_SIZE
    )
    groups = [AttentionGroup(0, (LAYER,), ToyBuilder())]
    spec = KVCacheSpec(num_kv_heads=1, head_size=1, dtype="float32")
    cache = KVCacheConfig(num_blocks, block_size, (KVCacheGroup((LAYER,), spec),))
    return Worker(kind(model, groups, limits, drafter=drafter), cache), model


def generate_alone(
    prompt: Sequence[int], num_tokens: int, *, seed: int = 0, **params: Any
) -> list[int]:
    """What a request must get, by the reference sampler and no engine at all."""
    request = new_request(token_ids=prompt, **params)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = edited(toy_logits(tokens).tolist(), request, tokens)
        tokens.append(sample(logits.tolist(), request.sampling_params, seed, len(tokens)))
    return tokens[len(prompt) :]


@dataclass
class HostRequest:
    """What the host knows of a request."""

    data: NewRequestData
    tokens: list[int]
    row: int | None = None
    num_computed: int = 0
    num_expected: int = 0
    """Known tokens and those that steps in flight will bring."""
    blocks: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.data.num_prompt_tokens :]


class Host:
    """Makes plans as a scheduler does, but does only what a test tells it to."""

    def __init__(self, worker: Worker, rng: np.random.Generator | None = None) -> None:
        self.worker = worker
        self.requests: dict[str, HostRequest] = {}
        self._block_size = worker.kv_cache_config.block_size
        self._rng = rng or np.random.default_rng(0)
        self._free_blocks = list(range(1, worker.kv_cache_config.num_blocks))
        self._rng.shuffle(self._free_blocks)
        self._free_rows = list(range(8))
        self._finished_rows: list[int] = []
        self._step_id = 0

    def add(self, req_id: str, prompt: Sequence[int], **params: Any) -> None:
        data = new_request(token_ids=prompt, **params)
        data.req_id = req_id
        self.requests[req_id] = HostRequest(data, list(prompt), num_expected=len(prompt))

    def leave_row(self, req_id: str) -> None:
        """Preempt a request, or end it."""
        request = self.requests[req_id]
        if request.row is None:
            return
        self._free_blocks += request.blocks
        self._rng.shuffle(self._free_blocks)
        self._finished_rows.append(request.row)
        self._free_rows = sorted([*self._free_rows, request.row])
        request.row, request.num_computed, request.blocks = None, 0, []

    def num_pending(self, req_id: str) -> int:
        request = self.requests[req_id]
        return request.num_expected - request.num_computed

    def plan(
        self,
        num_tokens: Mapping[str, int],
        *,
        drafts: Mapping[str, list[int]] | None = None,
        all_logits: Sequence[str] = (),
    ) -> SchedulerOutput:
        """The next step: so many known tokens of each request, and its drafts."""
        plan = SchedulerOutput(self._step_id, finished_rows=self._finished_rows)
        self._finished_rows, self._step_id = [], self._step_id + 1
        for req_id, count in num_tokens.items():
            request = self.requests[req_id]
            own_drafts = (drafts or {}).get(req_id, [])
            end = request.num_computed + count
            is_sampled = end == request.num_expected
            assert end <= request.num_expected
            assert is_sampled or not own_drafts
            total = end + len(own_drafts)
            blocks = [
                self._free_blocks.pop()
                for _ in range(-(-total // self._block_size) - len(request.blocks))
            ]
            request.blocks += blocks
            if request.row is None:
                request.row = self._free_rows.pop(0)
                plan.scheduled_new_reqs.append(self._enter(request))
            elif blocks:
                plan.scheduled_cached_reqs.rows.append(request.row)
                plan.scheduled_cached_reqs.new_block_ids.append((blocks,))
            plan.req_ids.append(req_id)
            plan.rows.append(request.row)
            plan.num_scheduled_tokens.append(count + len(own_drafts))
            plan.is_sampled.append(is_sampled)
            sampled = 1 + len(own_drafts) if is_sampled else 0
            plan.num_logits.append(count if req_id in all_logits else sampled)
            if own_drafts:
                plan.draft_token_ids[req_id] = own_drafts
            request.num_computed = end
            request.num_expected += is_sampled
        return plan

    def _enter(self, request: HostRequest) -> NewRequestData:
        assert request.row is not None
        request.data.row = request.row
        request.data.token_ids = list(request.tokens)
        request.data.block_ids = (list(request.blocks),)
        return request.data

    def settle(self, output: ModelRunnerOutput) -> None:
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self.requests[req_id]
            request.tokens += tokens
            request.error = output.errors.get(req_id)
            # With drafts a step brings more than the one token that was expected.
            extra = max(0, len(tokens) - 1)
            request.num_expected += extra
            request.num_computed += extra

    def step(self, num_tokens: Mapping[str, int] | None = None, **kwargs: Any) -> ModelRunnerOutput:
        """Plan, run and settle one step; by default all pending tokens of all requests."""
        if num_tokens is None:
            num_tokens = {req_id: self.num_pending(req_id) for req_id in self.requests}
        plan = self.plan(num_tokens, **kwargs)
        self.worker.execute_model(plan)
        output = self.worker.sample_tokens(None).result()
        self.settle(output)
        return output
