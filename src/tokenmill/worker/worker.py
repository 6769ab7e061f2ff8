"""The worker: one device's model runner, and the step again if one request breaks it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.contracts.seams import KVTransfer, StepFuture
from tokenmill.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a call raised: the boundary that a request's failure stops at.

    Only the reason is kept: the frames of a traceback would keep the step's tensors alive.
    """

    reason: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        name = type(error).__name__
        return cls(f"{name}: {error}" if str(error) else name)


class Worker:
    """Runs plans so that no request can harm another.

    A step that raises is run again request by request. Whoever fails alone is reported in
    `ModelRunnerOutput.errors`; the others get what they would have got. Nothing is committed before
    the end of a step, and a KV slot written twice holds the same, so a second run is safe.

    A GPU computes after the calls return: what breaks there breaks the device for all requests, and
    whoever asks for the step's result learns it.

    `KeyboardInterrupt` passes through and leaves the step uncommitted.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache_config: KVCacheConfig,
        kv_transfer: KVTransfer | None = None,
    ) -> None:
        """`kv_transfer` moves blocks of the runner's pool, if anything does."""
        self.runner = runner
        self.kv_cache_config = kv_cache_config
        self.kv_transfer = kv_transfer
        self._plan = SchedulerOutput(step_id=-1)
        self._forward: _Failure | None = None
        """Of the plan's forward pass; None if it succeeded."""

    def load_adapter(self, directory: str) -> AdapterInfo:
        """Read an adapter and check it. From any thread. Raises `AdapterError`."""
        return self.runner.adapters.load(directory)

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply a plan and run its forward pass."""
        self._plan = plan
        self._forward = None
        if not plan.is_repeated:
            self.runner.update_states(plan)
        if plan.rows:
            try:
                self.run_pass(plan)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises, one request pays
                self._forward = _Failure.of(error)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Finish the step that `execute_model` began, as far as the host goes."""
        plan = self._plan
        if not plan.rows:
            return ModelRunnerOutput(plan.step_id, [], [])
        failure = self._forward
        if failure is None:
            try:
                return self.runner.sample_tokens(grammar_output)
            except Exception as error:  # noqa: BLE001 - as above
                failure = _Failure.of(error)
        logger.warning(
            "Step %d failed (%s); running its %d requests one by one.",
            plan.step_id,
            failure.reason,
            len(plan.rows),
        )
        return self._run_one_by_one(plan, grammar_output)

    def run_pass(self, plan: SchedulerOutput) -> None:
        """The forward pass of a plan, or of one request's part of it when that is run again."""
        self.runner.execute_model(plan)

    def _run_one_by_one(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput:
        merged = ModelRunnerOutput(plan.step_id, plan.req_ids, [])
        for alone, mask in _split(plan, grammar_output):
            outcome = self._run_alone(alone, mask)
            if isinstance(outcome, _Failure):
                merged.sampled_token_ids.append([])
                merged.errors[alone.req_ids[0]] = (
                    f"The engine failed on this request: {outcome.reason}"
                )
                continue
            merged.sampled_token_ids += outcome.sampled_token_ids
            merged.logprobs |= outcome.logprobs
            merged.prompt_logprobs |= outcome.prompt_logprobs
            merged.draft_token_ids |= outcome.draft_token_ids
            merged.pooled |= outcome.pooled
            merged.errors |= outcome.errors
        return merged

    def _run_alone(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | _Failure:
        try:
            self.run_pass(plan)
            return self.runner.sample_tokens(grammar_output).result()
        except Exception as error:  # noqa: BLE001 - as above
            return _Failure.of(error)


def _split(
    plan: SchedulerOutput, grammar_output: GrammarOutput | None
) -> Iterator[tuple[SchedulerOutput, GrammarOutput | None]]:
    """One plan for each request, without differences: those are applied already."""
    masks = _split_grammar(plan, grammar_output) if grammar_output else {}
    for i, req_id in enumerate(plan.req_ids):
        alone = SchedulerOutput(
            step_id=plan.step_id,
            req_ids=[req_id],
            rows=[plan.rows[i]],
            num_scheduled_tokens=[plan.num_scheduled_tokens[i]],
            num_logits=[plan.num_logits[i]],
            is_sampled=[plan.is_sampled[i]],
            structured_req_ids=[req_id] if req_id in plan.structured_req_ids else [],
        )
        yield alone, masks.get(req_id)


def _split_grammar(plan: SchedulerOutput, grammar: GrammarOutput) -> dict[str, GrammarOutput]:
    """Each request's own masks: one row for each draft and one for the token after them."""
    num_rows = [1 + len(plan.draft_token_ids.get(req_id, ())) for req_id in grammar.req_ids]
    row_bytes = len(grammar.bitmask) // sum(num_rows)
    masks, start = {}, 0
    for req_id, count in zip(grammar.req_ids, num_rows, strict=True):
        end = start + count * row_bytes
        masks[req_id] = GrammarOutput([req_id], grammar.bitmask[start:end])
        start = end
    return masks
