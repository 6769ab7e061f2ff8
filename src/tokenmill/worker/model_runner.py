"""The model runner: a plan in, tokens out.

update_states              the plan's differences go into the rows
execute_model
  _prepare_inputs          one flat batch is gathered
  _build_attention_metadata
  _forward                 hidden states of every token
  _compute_logits          only where a token is sampled or a prompt log-probability is due
sample_tokens
  _sample                  grammar mask, sampler
  _count_new_tokens        drafts that hold
  _make_output
  commit                   the last act: until then the step can be run again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import TokenLogprobs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.models.base import CausalLM
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.logprobs import raw_logprobs, token_logprobs
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.sampling.sampler import Sampler, SamplerOutput
from tokenmill.worker.batch import InputBatch, InputBuffers, IntArray, runs
from tokenmill.worker.drafts import Drafter, NullDrafter, count_new_tokens
from tokenmill.worker.graphs.forward import DirectForward, ForwardPass, GraphStats, Recorder
from tokenmill.worker.rows import RowTable

LOGITS_SLAB = 64
"""Rows of logits computed at once: log-probabilities of a long prompt need no more memory."""

BAD_LOGITS = (
    "The model gave this request no usable logits: they hold NaN or infinite values, or every token"
    " is banned. If other requests fail alike, check the model's weights and dtype."
)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest step, and the shapes of the tables."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers that share metadata."""

    kv_group: int
    """Index of the KV cache group whose block table they use."""
    layer_names: tuple[str, ...]
    builder: AttentionMetadataBuilder


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """What a forward pass leaves for `sample_tokens`."""

    step_id: int
    batch: InputBatch
    logits: torch.Tensor
    """float32 [len(batch.sampled_indices), vocab_size]"""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """By place in the batch."""
    bad_reqs: set[int]
    """Places in the batch of requests whose prompt logits are not finite."""


class ModelRunner:
    """Runs one model's steps. Knows rows and plans, not why they were made."""

    def __init__(
        self,
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        *,
        sampler: Sampler | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        num_kv_groups = 1 + max(group.kv_group for group in attention_groups)
        self._model = model
        self._attention_groups = attention_groups
        self._vocab_size = limits.vocab_size
        self._rows = RowTable(
            limits.max_num_seqs, limits.max_model_len, limits.block_size, num_kv_groups
        )
        self._params = RowSamplingParams(limits.max_num_seqs, limits.vocab_size)
        self._buffers = InputBuffers(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self._rows.max_num_blocks,
            limits.block_size,
            num_kv_groups,
        )
        self._sampler = sampler or Sampler()
        self._drafter = drafter or NullDrafter()
        self._forward_pass: ForwardPass = DirectForward(model)
        self._state: ExecuteModelState | None = None
        self.num_bad_logits = 0
        """Requests that ended since their logits held NaN or infinite values, or nothing at all."""

    @torch.inference_mode()
    def capture(self, record: Recorder) -> None:
        """Have the forward pass recorded, on the buffers that steps are prepared in."""
        batch = self._buffers.full_batch()
        positions = torch.from_numpy(batch.positions)
        self._forward_pass = record(self._model, positions, self._build_attention_metadata(batch))

    @property
    def graph_stats(self) -> GraphStats:
        """How many steps were replayed, and how many run directly."""
        return self._forward_pass.stats

    def update_states(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows; once for each plan, in order."""
        for row in plan.finished_rows:
            self._rows.clear(row)
        for request in plan.scheduled_new_reqs:
            self._rows.add(request)
            self._params.set_row(request.row, request)
        cached = plan.scheduled_cached_reqs
        for row, block_ids in zip(cached.rows, cached.new_block_ids, strict=True):
            self._rows.append_blocks(row, block_ids)
        row_of = dict(zip(plan.req_ids, plan.rows, strict=True)) if plan.draft_token_ids else {}
        for req_id, draft_ids in plan.draft_token_ids.items():
            self._rows.set_drafts(row_of[req_id], draft_ids)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the forward pass of a plan whose differences are applied; it may be run again."""
        batch = self._prepare_inputs(plan)
        attn_metadata = self._build_attention_metadata(batch)
        hidden_states = self._forward(batch, attn_metadata)
        prompt_logprobs, bad_reqs = self._compute_prompt_logprobs(batch, hidden_states)
        self._state = ExecuteModelState(
            step_id=plan.step_id,
            batch=batch,
            logits=self._compute_logits(hidden_states, batch.sampled_indices),
            prompt_logprobs=prompt_logprobs,
            bad_reqs=bad_reqs,
        )

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample after the last forward pass, commit, and return the step's result."""
        state, self._state = self._state, None
        assert state is not None, "sample_tokens needs a forward pass before it"
        sampled = self._sample(state, grammar_output)
        num_new_tokens, is_good = self._count_new_tokens(state, sampled)
        output = self._make_output(state, sampled, num_new_tokens, is_good)
        self._commit(state.batch, sampled, num_new_tokens, is_good, output)
        return output

    def _prepare_inputs(self, plan: SchedulerOutput) -> InputBatch:
        return self._buffers.gather(plan, self._rows)

    def _build_attention_metadata(self, batch: InputBatch) -> dict[str, AttentionMetadata]:
        """Metadata by layer name; layers of one group share one object."""
        by_layer: dict[str, AttentionMetadata] = {}
        for group in self._attention_groups:
            common = CommonAttentionMetadata(
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                query_start_loc=torch.from_numpy(batch.query_start_loc),
                seq_lens=torch.from_numpy(batch.seq_lens),
                block_table=torch.from_numpy(batch.block_tables[group.kv_group]),
                slot_mapping=torch.from_numpy(batch.slot_mappings[group.kv_group]),
            )
            by_layer.update(dict.fromkeys(group.layer_names, group.builder.build(common)))
        return by_layer

    def _forward(
        self, batch: InputBatch, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]."""
        return self._forward_pass.run(
            torch.from_numpy(batch.input_ids), torch.from_numpy(batch.positions), attn_metadata
        )

    def _logits_slabs(
        self, hidden_states: torch.Tensor, indices: IntArray
    ) -> Iterator[torch.Tensor]:
        """Logits after the tokens at `indices`, in slabs of at most `LOGITS_SLAB` rows."""
        for begin in range(0, len(indices), LOGITS_SLAB):
            slab = torch.from_numpy(indices[begin : begin + LOGITS_SLAB])
            yield self._model.compute_logits(hidden_states[slab])

    def _compute_logits(self, hidden_states: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """Logits after the tokens at `indices`, float32 [len(indices), vocab_size]."""
        slabs = list(self._logits_slabs(hidden_states, indices))
        if len(slabs) == 1:
            return slabs[0]
        return torch.cat(slabs) if slabs else torch.empty(0, self._vocab_size)

    def _compute_prompt_logprobs(
        self, batch: InputBatch, hidden_states: torch.Tensor
    ) -> tuple[dict[int, list[TokenLogprobs]], set[int]]:
        """Log-probabilities of the prompt tokens that this step predicts.

        And the requests whose logits are not finite there; both by place in the batch.
        """
        if len(batch.logits_indices) == len(batch.sampled_indices):
            return {}, set()
        num_predictors = np.diff(batch.logits_start) - batch.num_sampled
        owners = np.repeat(np.arange(batch.num_reqs), num_predictors)
        indices = batch.logits_indices[runs(batch.logits_start[:-1], num_predictors)]
        # After a preemption the known output is computed like a prompt, but is none.
        in_prompt = batch.positions[indices] + 1 < self._rows.num_prompt_tokens[batch.rows[owners]]
        owners, indices = owners[in_prompt], indices[in_prompt]
        rows = batch.rows[owners]
        predicted = self._rows.token_ids[rows, batch.positions[indices] + 1].tolist()
        num_best = self._params.num_prompt_logprobs[rows].tolist()

        by_req: dict[int, list[TokenLogprobs]] = {}
        bad_reqs: set[int] = set()
        place = 0
        for logits in self._logits_slabs(hidden_states, indices):
            is_finite = logits.amax(-1).isfinite().tolist()
            for values, finite in zip(raw_logprobs(logits), is_finite, strict=True):
                req = int(owners[place])
                if not finite:
                    bad_reqs.add(req)
                entry = token_logprobs(values, predicted[place], num_best[place])
                by_req.setdefault(req, []).append(entry)
                place += 1
        return by_req, bad_reqs

    def _sample(
        self, state: ExecuteModelState, grammar_output: GrammarOutput | None
    ) -> SamplerOutput:
        batch = state.batch
        rows = np.repeat(batch.rows, batch.num_sampled)
        positions = batch.positions[batch.sampled_indices] + 1
        metadata = self._params.gather(
            rows=rows,
            positions=positions,
            num_output_tokens=positions - self._rows.num_prompt_tokens[rows],
            grammar=self._grammar_mask(batch, grammar_output),
        )
        return self._sampler.forward(state.logits, metadata)

    def _grammar_mask(self, batch: InputBatch, grammar_output: GrammarOutput | None) -> GrammarMask:
        """The masks, at the logits rows of their requests."""
        if grammar_output is None:
            return GrammarMask()
        place_of = {req_id: place for place, req_id in enumerate(batch.req_ids)}
        places = np.array([place_of[req_id] for req_id in grammar_output.req_ids], np.int64)
        num_words = -(-self._vocab_size // 32)
        return GrammarMask(
            logits_rows=runs(batch.sampled_start[places], batch.num_sampled[places]),
            bitmask=np.frombuffer(grammar_output.bitmask, "<i4").reshape(-1, num_words),
        )

    def _count_new_tokens(
        self, state: ExecuteModelState, sampled: SamplerOutput
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Tokens that each request gains, and whether it is sound; both [num_reqs]."""
        batch = state.batch
        # The draft for a sampled token is the input behind the token that predicts it.
        next_indices = np.minimum(batch.sampled_indices + 1, batch.num_tokens - 1)
        num_new = count_new_tokens(
            sampled.token_ids,
            batch.input_ids[next_indices],
            batch.sampled_start,
            batch.num_sampled,
        )
        is_good = np.ones(batch.num_reqs, np.bool_)
        is_good[list(state.bad_reqs)] = False
        if not sampled.is_valid.all():
            owners = np.repeat(np.arange(batch.num_reqs), num_new)
            is_good[owners[~sampled.is_valid[runs(batch.sampled_start, num_new)]]] = False
        return np.where(is_good, num_new, 0), is_good

    def _make_output(
        self,
        state: ExecuteModelState,
        sampled: SamplerOutput,
        num_new_tokens: IntArray,
        is_good: npt.NDArray[np.bool_],
    ) -> ModelRunnerOutput:
        batch = state.batch
        token_ids = sampled.token_ids.tolist()
        starts = batch.sampled_start
        spans = list(zip(starts.tolist(), (starts + num_new_tokens).tolist(), strict=True))
        asked = np.flatnonzero(self._params.wants_logprobs(batch.rows) & (num_new_tokens > 0))
        return ModelRunnerOutput(
            step_id=state.step_id,
            req_ids=batch.req_ids,
            sampled_token_ids=[token_ids[start:end] for start, end in spans],
            logprobs={
                batch.req_ids[place]: [sampled.logprobs[i] for i in range(*spans[place])]
                for place in asked.tolist()
            },
            prompt_logprobs={
                batch.req_ids[place]: entries
                for place, entries in state.prompt_logprobs.items()
                if is_good[place]
            },
            errors={batch.req_ids[i]: BAD_LOGITS for i in np.flatnonzero(~is_good).tolist()},
        )

    def _commit(
        self,
        batch: InputBatch,
        sampled: SamplerOutput,
        num_new_tokens: IntArray,
        is_good: npt.NDArray[np.bool_],
        output: ModelRunnerOutput,
    ) -> None:
        """Write the new tokens, let the drafter see them, and only then move the counts."""
        num_computed = batch.seq_lens - batch.num_sampled + num_new_tokens
        num_tokens = np.where(
            batch.num_sampled > 0, num_computed + 1, self._rows.num_tokens[batch.rows]
        )
        self._rows.token_ids[
            np.repeat(batch.rows, num_new_tokens),
            runs(num_tokens - num_new_tokens, num_new_tokens),
        ] = sampled.token_ids[runs(batch.sampled_start, num_new_tokens)]
        gained = np.flatnonzero(num_new_tokens > 0)
        output.draft_token_ids = self._drafter.propose(
            [batch.req_ids[place] for place in gained.tolist()],
            batch.rows[gained],
            num_tokens[gained],
            self._rows.token_ids,
        )
        self.num_bad_logits += len(output.errors)
        self._rows.commit(batch.rows[is_good], num_computed[is_good], num_tokens[is_good])
