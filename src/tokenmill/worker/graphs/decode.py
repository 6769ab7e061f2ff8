"""Steps in which every request computes one token and draws the next one: most steps.

On the native kernels such a step is one call, from the rows' tables to the drawn tokens, and one
that commits them (csrc/decode_step.h). They do what the runner does otherwise, bit for bit. But
between two steps the weights pass through the caches, and everything that numpy, torch and the
interpreter then need has to come from memory again. `check_graphs=True` runs each of these steps
both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tokenmill.attention.cpu import CpuMetadataBuilder
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.kernels import native
from tokenmill.models.base import CausalLM
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.worker.attention_groups import AttentionGroup
from tokenmill.worker.decode_steps import DecodeSteps, Drawn, NoDecodeSteps
from tokenmill.worker.graphs.cpu import NotRecordableError, RecordedForward, RecordedHead
from tokenmill.worker.graphs.forward import CheckedForward, ForwardPass
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.inputs.protocol import StepInputs
from tokenmill.worker.limits import RunnerLimits

logger = logging.getLogger(__name__)


class NativeDecodeSteps:
    """Native calls for most of a step."""

    def __init__(
        self,
        forward: RecordedForward,
        head: RecordedHead,
        attention_groups: Sequence[AttentionGroup],
        inputs: HostInputs,
        params: RowSamplingParams,
        adapter_rows: Any = None,
    ) -> None:
        """Raises `NotRecordableError` where a part is not native."""
        if not forward.embeds:
            raise NotRecordableError("embeddings are made outside of the recorded step")
        module, table, rows = native.module(), params.table, inputs.rows
        columns = module.RowColumns(
            is_plain=table.is_plain,
            is_greedy=table.is_greedy,
            temperature=table.random.temperature,
            min_p=table.random.min_p,
            top_k=table.random.top_k,
            top_p=table.random.top_p,
            seed=table.random.seed,
            num_tokens=rows.num_tokens,
            num_computed_tokens=rows.num_computed_tokens,
        )
        self._inputs = inputs
        self._stats = forward.stats
        self._step = module.DecodeStep(
            gather=inputs.gather,
            layers=forward.program,
            head=head.program,
            attention=[_attention_entry(group) for group in attention_groups],
            hidden=forward.hidden_states,
            head_input=head.input,
            logits=head.logits,
            columns=columns,
            adapters=adapter_rows,
        )
        self._held = forward, head  # whose memory the step works on

    @property
    def kernel_seconds(self) -> tuple[float, float, float]:
        """In the kernels of the layers, of the head, and of sampling, since the beginning."""
        seconds: tuple[float, float, float] = self._step.kernel_seconds
        return seconds

    def run(self, plan: SchedulerOutput) -> bool:
        if plan.draft_token_ids or plan.structured_req_ids or not self._inputs.are_text(plan):
            return False
        taken: bool = self._step.run(
            plan.rows, plan.num_scheduled_tokens, plan.num_logits, plan.is_sampled
        )
        if taken:
            self._stats.num_replayed += 1
        return taken

    def drawn(self) -> Drawn:
        """What the last step has drawn."""
        drawn: Drawn = self._step.drawn()
        return drawn

    def commit(self) -> Drawn:
        drawn: Drawn = self._step.commit()
        return drawn


class CheckedDecodeSteps:
    """Makes every step the runner's way, too, and compares the tokens."""

    def __init__(
        self,
        steps: NativeDecodeSteps,
        draw_otherwise: Callable[[SchedulerOutput], list[list[int]]],
    ) -> None:
        self._steps = steps
        self._draw_otherwise = draw_otherwise

    def run(self, plan: SchedulerOutput) -> bool:
        if not self._steps.run(plan):
            return False
        drawn, bad_places = self._steps.drawn()
        expected = self._draw_otherwise(plan)
        differing = [
            place
            for place, (found, due) in enumerate(zip(drawn, expected, strict=True))
            if found != due and place not in bad_places
        ]
        if differing:
            raise AssertionError(f"the native step draws other tokens in places {differing}")
        return True

    def commit(self) -> Drawn:
        return self._steps.commit()


def record_decode_steps(
    model: CausalLM,
    forward: ForwardPass,
    attention_groups: Sequence[AttentionGroup],
    inputs: StepInputs,
    params: RowSamplingParams,
    limits: RunnerLimits,
    draw_otherwise: Callable[[SchedulerOutput], list[list[int]]],
    adapter_rows: Any = None,
) -> DecodeSteps:
    """Native steps where everything is recorded, none where something cannot be. They tell
    `adapter_rows`, if there are any, which rows they compute.

    Where the forward pass is checked, steps are compared with what `draw_otherwise` draws.
    """
    is_checked = isinstance(forward, CheckedForward)
    recorded = forward.recorded if isinstance(forward, CheckedForward) else forward
    if not isinstance(recorded, RecordedForward) or not isinstance(inputs, HostInputs):
        return NoDecodeSteps()
    try:
        num_rows = min(limits.logits_slab, limits.max_num_seqs)
        head = RecordedHead(model, recorded.hidden_states, num_rows)
        steps = NativeDecodeSteps(recorded, head, attention_groups, inputs, params, adapter_rows)
    except NotRecordableError as error:
        logger.info("steps that only decode are not made in native calls: %s", error)
        return NoDecodeSteps()
    return CheckedDecodeSteps(steps, draw_otherwise) if is_checked else steps


def _attention_entry(group: AttentionGroup) -> tuple[Any, Any, int, int]:
    """Plan, shape, KV cache group and its number of blocks."""
    builder = group.builder
    if not isinstance(builder, CpuMetadataBuilder):
        raise NotRecordableError(f"a group of layers is planned by {type(builder).__name__}")
    plan, shape, num_blocks = builder.handles
    return plan, shape, group.kv_group, num_blocks
