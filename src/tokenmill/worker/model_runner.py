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
  write_tokens             into the rows, where the next step reads them
  _finish                  the result; on a GPU when the host asks for it, while the next step runs
  _commit                  the last act: until then the step can be run again

Where all requests decode, `DecodeSteps` may make the step instead: the same, in native calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.backend import AttentionMetadata, CommonAttentionMetadata
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import TokenLogprobs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import StepFuture
from tokenmill.models.base import CausalLM
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.sampling.sampler import Sampler, Samples, TokenSampler
from tokenmill.worker.adapters import NoAdapters, RowAdapters
from tokenmill.worker.attention_groups import AttentionGroup, num_kv_groups
from tokenmill.worker.batch import (
    BatchShape,
    BatchTensors,
    InputBatch,
    IntArray,
    NewTokens,
    gather_batch,
    runs,
)
from tokenmill.worker.decode_steps import DecodeSteps, NoDecodeSteps
from tokenmill.worker.drafts import Drafter, NullDrafter, count_new_tokens
from tokenmill.worker.graphs.forward import DirectForward, ForwardPass, GraphStats, Recorder
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.inputs.protocol import StepInputs
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.results import (
    ExecuteModelState,
    decode_output,
    finish_now,
    make_output,
)
from tokenmill.worker.rows import RowTable

BoolArray = npt.NDArray[np.bool_]

AttentionMetadataByLayer = Mapping[str, AttentionMetadata]

Finish = Callable[[], ModelRunnerOutput]
"""Makes a step's result; waits for the device."""

DecodeRecorder = Callable[..., DecodeSteps]
"""Records steps that only decode: `graphs/decode.py`."""


class ModelRunner:
    """Runs one model's steps. Knows rows and plans, not why they were made.

    By default everything is done on the host, in the calls themselves. For a GPU, `worker/build.py`
    gives it other `inputs` and another `sampler`, and lets results be finished later.
    """

    def __init__(
        self,
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        *,
        inputs: StepInputs | None = None,
        sampler: TokenSampler | None = None,
        row_params: RowSamplingParams | None = None,
        drafter: Drafter | None = None,
        adapters: RowAdapters | None = None,
        hand_over: Callable[[Finish], StepFuture] = finish_now,
    ) -> None:
        self._model = model
        self._attention_groups = attention_groups
        self.limits = limits
        self._inputs = inputs or HostInputs(
            limits.make_rows(num_kv_groups(attention_groups)), limits.max_num_batched_tokens
        )
        self._rows = self._inputs.rows
        self._params = row_params or RowSamplingParams(limits.max_num_seqs, limits.vocab_size)
        self._sampler = sampler or Sampler()
        self._drafter = drafter or NullDrafter()
        self.adapters: RowAdapters = adapters or NoAdapters()
        self._drafts = drafter is not None
        self._hand_over = hand_over
        self._forward_pass: ForwardPass = DirectForward(model)
        self._decode_steps: DecodeSteps = NoDecodeSteps()
        self._state: ExecuteModelState | SchedulerOutput | None = None
        """What the last forward pass left; of a step made by `_decode_steps`, its plan."""
        self.num_bad_logits = 0
        """Requests that ended since their logits held NaN or infinite values, or nothing at all."""

    @torch.inference_mode()
    def capture(self, record: Recorder) -> None:
        """Have the forward pass recorded, on the buffers that steps are prepared in."""
        self._forward_pass = record(self._model, self.limits.largest_step, self._blank_step)

    def wrap_forward(self, wrap: Callable[[ForwardPass], ForwardPass]) -> None:
        """Put something around every forward pass; after `capture`."""
        self._forward_pass = wrap(self._forward_pass)

    @torch.inference_mode()
    def capture_decode_steps(self, record: DecodeRecorder) -> None:
        """Have the steps recorded that only decode; after `capture`."""
        self._decode_steps = record(
            self._model,
            self._forward_pass,
            self._attention_groups,
            self._inputs,
            self._params,
            self.limits,
            self._draw,
            self.adapters.native_rows,
        )

    @torch.inference_mode()
    def run_blank(self, shape: BatchShape) -> None:
        """Compute a step of that size that touches no request, to see what memory it takes."""
        tensors, attn_metadata = self._blank_step(shape)
        hidden_states = DirectForward(self._model).run(tensors, attn_metadata)
        num_rows = min(self.limits.max_num_seqs, len(hidden_states))
        self._model.compute_logits(hidden_states[:num_rows])

    @property
    def model_and_drafter(self) -> tuple[CausalLM, Drafter]:
        """What has weights, and keeps something of sequences."""
        return self._model, self._drafter

    @property
    def rows(self) -> RowTable:
        """The requests at work."""
        return self._rows

    @property
    def supports_graphs(self) -> bool:
        """Whether the launches of a step may be captured in a CUDA graph."""
        return all(group.supports_graphs for group in self._attention_groups)

    def warm_up(self) -> None:
        """Compile what a step may need besides a recorded one, so that no request waits for it."""
        self._inputs.warm_up()
        for shape in self.limits.steps_of_variants:
            self.run_blank(shape)
        self._sampler.warm_up()

    @property
    def graph_stats(self) -> GraphStats:
        """How many steps were replayed, and how many run directly."""
        return self._forward_pass.stats

    def update_states(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows; once for each plan, in order."""
        self._inputs.update(plan)
        self.adapters.update(plan)
        for request in plan.scheduled_new_reqs:
            self._params.set_row(request.row, request)
        self._drafter.update(plan)

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the forward pass of a plan whose differences are applied; it may be run again."""
        self.adapters.check(plan)
        self._state = plan if self._decode_steps.run(plan) else self._execute(plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Sample after the last forward pass, commit, and hand over the step's result."""
        state, self._state = self._state, None
        assert state is not None, "sample_tokens needs a forward pass before it"
        if isinstance(state, ExecuteModelState):
            return self._sample_and_commit(state, grammar_output)
        assert grammar_output is None, "steps with masks are none that only decode"
        output = decode_output(state, self._decode_steps.commit())
        self.num_bad_logits += len(output.errors)
        if self._drafts:
            rows = np.array(state.rows, np.int64)
            gained = np.array([bool(each) for each in output.sampled_token_ids])
            num_tokens = self._rows.num_tokens[rows]
            output.draft_token_ids = self._propose(state.req_ids, rows, num_tokens, gained)
        return output

    @torch.inference_mode()
    def _execute(self, plan: SchedulerOutput) -> ExecuteModelState:
        batch, tensors = self._prepare_inputs(plan)
        attn_metadata = self._build_attention_metadata(tensors)
        hidden_states = self._forward(tensors, attn_metadata)
        prompt_logprobs, bad_reqs = self._compute_prompt_logprobs(batch, hidden_states)
        return ExecuteModelState(
            step_id=plan.step_id,
            batch=batch,
            logits=self._compute_logits(hidden_states, batch.sampled_indices),
            wants_logprobs=self._params.wants_logprobs(batch.rows),
            prompt_logprobs=prompt_logprobs,
            bad_reqs=bad_reqs,
        )

    @torch.inference_mode()
    def _sample_and_commit(
        self, state: ExecuteModelState, grammar_output: GrammarOutput | None
    ) -> StepFuture:
        samples = self._sample(state, grammar_output)
        num_new_tokens = self._count_new_tokens(state.batch, samples)
        new = state.batch.new_tokens(num_new_tokens)
        self._inputs.write_tokens(samples, new)
        result = self._hand_over(partial(self._finish, state, samples, new))
        self._commit(state.batch, new)
        return result

    @torch.inference_mode()
    def _draw(self, plan: SchedulerOutput) -> list[list[int]]:
        """The tokens that a step would bring; nothing is written."""
        sampled = self._sample(self._execute(plan), None).to_host()
        return [[token_id] for token_id in sampled.token_ids.tolist()]

    def _prepare_inputs(self, plan: SchedulerOutput) -> tuple[InputBatch, BatchTensors]:
        batch = gather_batch(plan, self._rows)
        tensors = self._inputs.fill(batch, self._forward_pass.padded(batch.shape))
        self.adapters.fill(batch.rows, batch.num_scheduled_tokens, tensors.shape.num_tokens)
        return batch, tensors

    def _blank_step(self, shape: BatchShape) -> tuple[BatchTensors, AttentionMetadataByLayer]:
        tensors = self._inputs.blank(shape)
        return tensors, self._build_attention_metadata(tensors)

    def _build_attention_metadata(self, tensors: BatchTensors) -> AttentionMetadataByLayer:
        """Metadata by layer name; layers of one group share one object."""
        by_layer: dict[str, AttentionMetadata] = {}
        for group in self._attention_groups:
            common = CommonAttentionMetadata(
                num_reqs=tensors.shape.num_reqs,
                num_tokens=tensors.shape.num_tokens,
                max_query_len=tensors.shape.max_query_len,
                max_seq_len=tensors.shape.max_seq_len,
                query_start_loc=tensors.query_start_loc,
                seq_lens=tensors.seq_lens,
                block_table=tensors.block_tables[group.kv_group],
                slot_mapping=tensors.slot_mappings[group.kv_group],
                causal=group.causal,
            )
            metadata = group.build(common, tensors.item_runs)
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer

    def _forward(
        self, tensors: BatchTensors, attn_metadata: AttentionMetadataByLayer
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]; there may be more rows, of padding."""
        return self._forward_pass.run(tensors, attn_metadata)

    def _logits_slabs(
        self, hidden_states: torch.Tensor, indices: IntArray
    ) -> Iterator[torch.Tensor]:
        """Logits after the tokens at `indices`, in slabs of at most `logits_slab` rows."""
        for begin in range(0, len(indices), self.limits.logits_slab):
            slab = indices[begin : begin + self.limits.logits_slab]
            yield self._model.compute_logits(self._rows_at(hidden_states, slab))

    def _rows_at(self, hidden_states: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """Hidden states of the tokens at `indices`, which rise; there is at least one."""
        first, end = int(indices[0]), int(indices[-1]) + 1
        if end - first == len(indices):  # all of them, as where every request decodes
            return hidden_states[first:end]
        return hidden_states[self._inputs.stage(indices)]

    def _compute_logits(self, hidden_states: torch.Tensor, indices: IntArray) -> torch.Tensor:
        """Logits after the tokens at `indices`, float32 [len(indices), vocab_size]."""
        if not len(indices):
            return hidden_states.new_empty(0, self.limits.vocab_size, dtype=torch.float32)
        return self._model.compute_logits(self._rows_at(hidden_states, indices))

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
        entries = runs(batch.logits_start[:-1], num_predictors)
        positions = batch.logits_positions[entries] + 1
        # After a preemption the known output is computed like a prompt, but is none.
        in_prompt = positions < self._rows.num_prompt_tokens[batch.rows[owners]]
        owners, entries, positions = owners[in_prompt], entries[in_prompt], positions[in_prompt]
        rows = batch.rows[owners]
        predicted = self._rows.token_ids[rows, positions].astype(np.int64)
        num_best = self._params.num_prompt_logprobs[rows]

        by_req: dict[int, list[TokenLogprobs]] = {}
        bad_reqs: set[int] = set()
        begin = 0
        for logits in self._logits_slabs(hidden_states, batch.logits_indices[entries]):
            part = slice(begin, begin + len(logits))
            scores, is_finite = self._sampler.score(logits, predicted[part], num_best[part])
            for req, entry, finite in zip(owners[part].tolist(), scores, is_finite, strict=True):
                by_req.setdefault(req, []).append(entry)
                if not finite:
                    bad_reqs.add(req)
            begin = part.stop
        return by_req, bad_reqs

    def _sample(self, state: ExecuteModelState, grammar_output: GrammarOutput | None) -> Samples:
        batch = state.batch
        metadata = self._params.gather(
            rows=batch.sampled_rows,
            positions=batch.sampled_positions,
            num_prompt_tokens=self._rows.num_prompt_tokens,
            token_ids=self._inputs.token_ids,
            grammar=self._grammar_mask(batch, grammar_output),
        )
        return self._sampler.forward(state.logits, metadata)

    def _grammar_mask(self, batch: InputBatch, grammar_output: GrammarOutput | None) -> GrammarMask:
        """The masks, at the logits rows of their requests."""
        if grammar_output is None:
            return GrammarMask()
        place_of = {req_id: place for place, req_id in enumerate(batch.req_ids)}
        places = np.array([place_of[req_id] for req_id in grammar_output.req_ids], np.int64)
        num_words = -(-self.limits.vocab_size // 32)
        return GrammarMask(
            logits_rows=runs(batch.sampled_start[places], batch.num_sampled[places]),
            bitmask=np.frombuffer(grammar_output.bitmask, "<i4").reshape(-1, num_words),
        )

    def _count_new_tokens(self, batch: InputBatch, samples: Samples) -> IntArray:
        """Tokens that each request gains, [num_reqs]; with drafts, that waits for the ids."""
        if not batch.has_drafts:
            return batch.num_sampled
        # Behind a request's last draft stands nothing; whatever is read there is not compared.
        places = np.minimum(batch.sampled_positions, self._rows.token_ids.shape[1] - 1)
        return count_new_tokens(
            samples.to_host().token_ids,
            self._rows.token_ids[batch.sampled_rows, places],
            batch.sampled_start,
            batch.num_sampled,
        )

    def _finish(
        self, state: ExecuteModelState, samples: Samples, new: NewTokens
    ) -> ModelRunnerOutput:
        """The step's result, and what the drafter makes of it."""
        batch, sampled = state.batch, samples.to_host()
        bad_reqs = state.bad_reqs
        if not sampled.is_valid.all():
            owners = np.repeat(np.arange(batch.num_reqs), new.counts)
            bad_reqs = bad_reqs | set(owners[~sampled.is_valid[new.entries]].tolist())
        counts = new.counts
        if bad_reqs:
            self.num_bad_logits += len(bad_reqs)
            counts = counts.copy()
            counts[list(bad_reqs)] = 0
        output = make_output(state, sampled, counts, bad_reqs)
        self._inputs.settle_tokens(sampled.token_ids[new.entries], new)
        output.draft_token_ids = self._propose(
            batch.req_ids, batch.rows, new.num_computed + 1, counts > 0
        )
        return output

    def _propose(
        self, req_ids: list[str], rows: IntArray, num_tokens: IntArray, gained: BoolArray
    ) -> dict[str, list[int]]:
        """Drafts of the requests of a step that have gained tokens, and have so many now."""
        places = np.flatnonzero(gained)
        return self._drafter.propose(
            [req_ids[place] for place in places.tolist()],
            rows[places],
            num_tokens[places],
            self._rows.token_ids,
        )

    def _commit(self, batch: InputBatch, new: NewTokens) -> None:
        """Move the rows' counts: the next step computes what follows."""
        num_tokens = np.where(
            batch.num_sampled > 0, new.num_computed + 1, self._rows.num_tokens[batch.rows]
        )
        self._rows.commit(batch.rows, new.num_computed, num_tokens)
