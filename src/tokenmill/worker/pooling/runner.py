"""The runner of a model that pools.

update_states    as for every model; and what each new request wants
execute_model    as for every model, but hidden states go into the requests' pool states
sample_tokens    results of the prompts that are complete; then the states are committed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.attention.forward_context import set_forward_context
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import PoolingRequest, TensorData
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import StepFuture
from tokenmill.models.base import CausalLM
from tokenmill.models.pooling import Encoder
from tokenmill.worker.adapters import RowAdapters
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.batch import BatchShape, BatchTensors, InputBatch
from tokenmill.worker.graphs.forward import DirectForward
from tokenmill.worker.inputs.protocol import StepInputs
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import AttentionMetadataByLayer, ModelRunner
from tokenmill.worker.pooling.pooler import Pooler, as_data, to_host
from tokenmill.worker.pooling.states import PoolState

NOT_FINITE = (
    "The model gave this request no usable result: it holds NaN or infinite values. If other"
    " requests fail alike, check the model's weights and dtype."
)
_NO_SECOND_TEXT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class PooledStep:
    """What a forward pass leaves for `sample_tokens`."""

    step_id: int
    batch: InputBatch
    states: list[PoolState]
    """Of the requests, after this step."""
    pooled: dict[str, TensorData]
    errors: dict[str, str]


class PoolingRunner(ModelRunner):
    """Runs the steps of a decoder that pools."""

    def __init__(
        self,
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        pooler: Pooler,
        adapters: RowAdapters | None = None,
        inputs: StepInputs | None = None,
    ) -> None:
        super().__init__(model, attention_groups, limits, adapters=adapters, inputs=inputs)
        self._pooler = pooler
        self._requests: dict[int, PoolingRequest] = {}
        """By row."""
        self._states: dict[int, PoolState] = {}
        """By row; entries of rows that were freed are replaced by the next request."""
        self._pooled_step: PooledStep | None = None

    def update_states(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows; once for each plan, in order."""
        self._inputs.update(plan)
        self.adapters.update(plan)
        for request in plan.scheduled_new_reqs:
            assert request.pooling is not None, "this model samples no tokens"
            self._requests[request.row] = request.pooling
            self._states[request.row] = self._pooler.start(request.pooling)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the forward pass of a plan whose differences are applied; it may be run again."""
        self.adapters.check(plan)
        batch, tensors = self._prepare_inputs(plan)
        attn_metadata = self._build_attention_metadata(tensors)
        hidden_states = self._hidden_states(batch, tensors, attn_metadata)
        self._pooled_step = self._pool(plan, batch, hidden_states)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Commit, and hand over the results of the last forward pass."""
        step, self._pooled_step = self._pooled_step, None
        assert step is not None, "sample_tokens needs a forward pass before it"
        batch = step.batch
        self._states.update(zip(batch.rows.tolist(), step.states, strict=True))
        self._rows.commit(
            batch.rows, batch.seq_lens.astype(np.int64), self._rows.num_tokens[batch.rows]
        )
        return ModelRunnerOutput(
            step_id=step.step_id,
            req_ids=batch.req_ids,
            sampled_token_ids=[[] for _ in batch.req_ids],
            pooled=step.pooled,
            errors=step.errors,
        )

    @torch.inference_mode()
    def run_blank(self, shape: BatchShape) -> None:
        """As of every model, without logits."""
        self._blank_hidden_states(*self._blank_step(shape))

    def _blank_hidden_states(
        self, tensors: BatchTensors, attn_metadata: AttentionMetadataByLayer
    ) -> torch.Tensor:
        return DirectForward(self._model).run(tensors, attn_metadata)

    def _hidden_states(
        self, batch: InputBatch, tensors: BatchTensors, attn_metadata: AttentionMetadataByLayer
    ) -> torch.Tensor:
        """[num_tokens, hidden_size]; there may be more rows, of padding."""
        return self._forward(tensors, attn_metadata)

    def _pool(
        self, plan: SchedulerOutput, batch: InputBatch, hidden_states: torch.Tensor
    ) -> PooledStep:
        starts, rows = batch.query_start_loc.tolist(), batch.rows.tolist()
        is_complete = (batch.seq_lens == self._rows.num_prompt_tokens[batch.rows]).tolist()
        states, results = [], {}
        for place, row in enumerate(rows):
            part = hidden_states[starts[place] : starts[place + 1]]
            states.append(self._states[row].add(part))
            if is_complete[place]:
                req_id = batch.req_ids[place]
                results[req_id] = self._pooler.finish(self._requests[row], states[-1])
        pooled, errors = {}, {}
        for req_id, result in zip(results, to_host(list(results.values())), strict=True):
            if torch.isfinite(result).all():
                pooled[req_id] = as_data(result)
            else:
                errors[req_id] = NOT_FINITE
        return PooledStep(plan.step_id, batch, states, pooled, errors)


class EncoderRunner(PoolingRunner):
    """Runs the steps of an encoder: prompts as a whole, pairs of texts with their types."""

    def _blank_hidden_states(
        self, tensors: BatchTensors, attn_metadata: AttentionMetadataByLayer
    ) -> torch.Tensor:
        return self._encode(tensors, attn_metadata, torch.zeros_like(tensors.positions))

    def _hidden_states(
        self, batch: InputBatch, tensors: BatchTensors, attn_metadata: AttentionMetadataByLayer
    ) -> torch.Tensor:
        return self._encode(tensors, attn_metadata, self._token_types(batch, tensors))

    def _encode(
        self,
        tensors: BatchTensors,
        attn_metadata: AttentionMetadataByLayer,
        token_types: torch.Tensor,
    ) -> torch.Tensor:
        model = self._model
        assert isinstance(model, Encoder)
        with set_forward_context(attn_metadata):
            return model.encode(tensors.input_ids, tensors.positions, token_types)

    def _token_types(self, batch: InputBatch, tensors: BatchTensors) -> torch.Tensor:
        """int64 [num_tokens]: 1 for tokens of a pair's second text, 0 for all others."""
        seconds = (self._requests[row].second_text_start for row in batch.rows.tolist())
        starts = np.array([_NO_SECOND_TEXT if each is None else each for each in seconds], np.int64)
        starts = starts.repeat(batch.num_scheduled_tokens)
        return (tensors.positions >= self._inputs.stage(starts)).long()
