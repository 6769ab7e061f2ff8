"""One stage of a pipeline: a model's part, and the runner and the worker of it.

    first stage      ids -> embedding, layers -> the residual stream, sent on
    middle stages    the stream, received -> layers -> the stream, sent on
    last stage       the stream, received -> layers, norm, head -> tokens

All stages are given the same plans, and have rows for the same requests. Those that do not sample
are told the tokens with a later plan: a request is in one step at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tokenmill.attention.backend import AttentionMetadata
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.result import SampledTokens
from tokenmill.contracts.seams import StepFuture
from tokenmill.layers.attention import Attention
from tokenmill.layers.kernels import LayerKernels
from tokenmill.models.base import CausalLM, IntermediateTensors
from tokenmill.parallel.links import StageLinks
from tokenmill.worker.batch import BatchShape, BatchTensors
from tokenmill.worker.graphs.forward import ForwardPass, GraphStats
from tokenmill.worker.group_worker import GroupWorker
from tokenmill.worker.model_runner import ModelRunner


class StageModel:
    """A `CausalLM` from stream to stream: the runner and its recordings need not know better."""

    def __init__(
        self, part: CausalLM, kernels: LayerKernels, hidden_size: int, *, is_first: bool
    ) -> None:
        """`part` has the layers of this stage."""
        self._part = part
        self._kernels = kernels
        self.hidden_size = hidden_size
        self._is_first = is_first

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Of the first stage; the others begin with what they receive, which is like this."""
        if self._is_first:
            return self._part.embed_input_ids(input_ids)
        return torch.zeros(len(input_ids), self.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The stream behind this stage's layers, or what the last one ends in."""
        found = self._part.forward(input_ids, positions, inputs_embeds=inputs_embeds)
        if isinstance(found, torch.Tensor):
            return found
        stream = self._kernels.empty(len(input_ids), self.hidden_size, torch.float32)
        return self._kernels.add_residual(found["hidden_states"], found["residual"], stream)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._part.compute_logits(hidden_states)

    def attention_layers(self) -> Mapping[str, Attention]:
        return self._part.attention_layers()


class PassingRunner(ModelRunner):
    """Runs the steps of a stage that is not the last: of its steps it sees no end."""

    def __init__(self, *arguments: Any, links: StageLinks, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self._links = links
        self._req_ids: dict[int, str] = {}
        """Whose row it is."""

    def learn(self, sampled: SampledTokens) -> None:
        """Take in what the last stage has sampled for requests that still have their rows."""
        for req_id, row, token_ids in zip(
            sampled.req_ids, sampled.rows, sampled.token_ids, strict=True
        ):
            if token_ids and self._req_ids.get(row) == req_id:
                self._rows.append_tokens(row, token_ids)
                self._rows.keep_computed(row)

    def update_states(self, plan: SchedulerOutput) -> None:
        for row in plan.finished_rows:
            self._req_ids.pop(row, None)
        self._req_ids.update({request.row: request.req_id for request in plan.scheduled_new_reqs})
        super().update_states(plan)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Compute and hand on; nothing is sampled here, so the step is committed at once, as if all
        drafts were to hold.
        """
        self.adapters.check(plan)
        batch, tensors = self._prepare_inputs(plan)
        stream = self._forward(tensors, self._build_attention_metadata(tensors))
        self._links.send(stream[: tensors.shape.num_tokens])
        num_computed = batch.seq_lens.astype(np.int64)
        self._rows.commit(batch.rows, num_computed, self._rows.num_tokens[batch.rows])


class ReceivingForward:
    """The `ForwardPass` of a stage that is not the first: begins with what is handed to it."""

    def __init__(self, inner: ForwardPass, *, links: StageLinks, hidden_size: int) -> None:
        self._inner = inner
        self._links = links
        self._hidden_size = hidden_size

    @property
    def stats(self) -> GraphStats:
        return self._inner.stats

    def padded(self, shape: BatchShape) -> BatchShape:
        """As this stage's recording wants it."""
        return self._inner.padded(shape)

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        received = self._links.receive(tensors.shape.num_tokens, self._hidden_size)
        return self._inner.run(replace(tensors, inputs_embeds=received), attn_metadata)


class StageWorker(GroupWorker):
    """Runs plans as they are: one that fails in a stage cannot be run again request by request, as
    the other stages know nothing of it. The engine's recovery finds who is to blame.
    """

    def learn(self, sampled: SampledTokens) -> None:
        """Take in what was sampled in an earlier step."""
        assert isinstance(self.runner, PassingRunner), "the last stage knows"
        self.runner.learn(sampled)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.runner.update_states(plan)
        self.run_pass(plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        return self.runner.sample_tokens(grammar_output)
