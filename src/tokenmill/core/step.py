"""One step: its plan while it is made, and the requests in it while it is in flight."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from tokenmill.contracts.plan import BlockIds, NewRequestData, SchedulerOutput
from tokenmill.core.chunks import ChunkSizes
from tokenmill.core.encoder import NO_ENCODER, EncoderSchedule
from tokenmill.core.request import Request


class Step(msgspec.Struct):
    """A plan, the requests of its batch (parallel lists), and what is left of the budget."""

    plan: SchedulerOutput
    token_budget: int
    """Tokens that may still be scheduled."""
    chunks: ChunkSizes
    running: Mapping[str, Request] = {}
    """All that run, whether or not they are in the step yet."""
    encoder: EncoderSchedule = NO_ENCODER
    requests: list[Request] = []
    is_decode: list[bool] = []
    """Whether a request computes one token and gets one, and none of others' choice with it."""
    num_preempted: int = 0
    num_repeats: int = sys.maxsize
    """How often at least all of its requests can do the same again."""

    def fitting(self, request: Request, num_computed_tokens: int, wanted: int) -> int:
        """How many of the `wanted` next tokens of a request, behind those that are computed, the
        step still takes; 0 if others leave no room.
        """
        num_tokens = self._fitting(num_computed_tokens, wanted)
        if num_tokens:
            most = min(wanted, self.token_budget)
            num_tokens = self.encoder.whole(request, num_computed_tokens, num_tokens, most)
        return self.encoder.fitting(request, num_computed_tokens, num_tokens)

    def _fitting(self, num_computed_tokens: int, wanted: int) -> int:
        most = min(wanted, self.chunks.longest, self.token_budget)
        if self.chunks.never_cut(most):
            return most
        work = self.chunks.work
        decode_work = sum(
            work(each.num_computed_tokens, 1) for each in self.running.values() if each.decodes
        )
        counts = zip(self.requests, self.plan.num_scheduled_tokens, strict=True)
        taken = sum(work(each.num_computed_tokens, n) for each, n in counts if not each.decodes)
        room = self.chunks.room(decode_work)
        return self.chunks.fitting(num_computed_tokens, most, room, taken)

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Schedule the request's next tokens; its drafts are the last of them."""
        plan = self.plan
        self.encoder.take(request, num_new_tokens)
        end = request.num_computed_tokens + num_new_tokens
        num_drafts = max(0, end - request.num_expected_tokens)
        is_sampled = end >= request.num_expected_tokens and not request.is_pooling
        if request.owes_prompt_logits:
            num_logits = num_new_tokens
        else:
            num_logits = 1 + num_drafts if is_sampled else 0
        if num_drafts:
            plan.draft_token_ids[request.request_id] = request.draft_token_ids[:num_drafts]
        plan.req_ids.append(request.request_id)
        assert request.row is not None
        if request.num_untold_tokens:
            cached = plan.scheduled_cached_reqs
            cached.appended_rows.append(request.row)
            cached.appended_token_ids.append(request.all_token_ids[-request.num_untold_tokens :])
        if request.is_structured and is_sampled:
            plan.structured_req_ids.append(request.request_id)
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(num_new_tokens)
        plan.num_logits.append(num_logits)
        plan.is_sampled.append(is_sampled)
        self.requests.append(request)
        self.is_decode.append(
            num_new_tokens == 1 and is_sampled and not num_drafts and request.is_plain
        )
        self.num_repeats = 0
        self.token_budget -= num_new_tokens

    def add_decode(self, request: Request, num_steps: int) -> None:
        """`add` for a request that decodes in place (`decoding.py`) in the next `num_steps` steps,
        this one included.
        """
        plan = self.plan
        assert request.row is not None
        plan.req_ids.append(request.request_id)
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(1)
        plan.num_logits.append(1)
        plan.is_sampled.append(True)
        self.requests.append(request)
        self.is_decode.append(True)
        if num_steps <= self.num_repeats:
            self.num_repeats = num_steps - 1
        self.token_budget -= 1

    def add_block_ids(self, request: Request, new_block_ids: BlockIds) -> None:
        """Tell the workers which blocks a running request's tables grow by, if any."""
        if new_block_ids[0]:
            assert request.row is not None
            self.plan.scheduled_cached_reqs.rows.append(request.row)
            self.plan.scheduled_cached_reqs.new_block_ids.append(new_block_ids)

    def add_new(self, request: Request, block_ids: BlockIds) -> None:
        """Tell the workers everything about a request that enters its row."""
        assert request.row is not None
        self.plan.scheduled_new_reqs.append(
            NewRequestData.from_request(
                request.data,
                row=request.row,
                token_ids=request.all_token_ids.copy(),
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
            )
        )

    def remove(self, request: Request) -> None:
        """Undo `add` and `add_block_ids` for a running request that has to give way after all."""
        plan, cached = self.plan, self.plan.scheduled_cached_reqs
        if request not in self.requests:
            return
        index = self.requests.index(request)
        self.token_budget += plan.num_scheduled_tokens[index]
        parallel: tuple[list[Request] | list[str] | list[int] | list[bool], ...] = (
            self.requests,
            self.is_decode,
            plan.req_ids,
            plan.rows,
            plan.num_scheduled_tokens,
            plan.num_logits,
            plan.is_sampled,
        )
        for entries in parallel:
            del entries[index]
        plan.draft_token_ids.pop(request.request_id, None)
        if request.request_id in plan.structured_req_ids:
            plan.structured_req_ids.remove(request.request_id)
        if request.row in cached.appended_rows:
            index = cached.appended_rows.index(request.row)
            del cached.appended_rows[index]
            del cached.appended_token_ids[index]
        if request.row in cached.rows:
            index = cached.rows.index(request.row)
            del cached.rows[index]
            del cached.new_block_ids[index]

    def num_due(self, index: int) -> int:
        """Most tokens that entry `index` of the batch may bring."""
        if not self.plan.is_sampled[index]:
            return 0
        return 1 + len(self.plan.draft_token_ids.get(self.plan.req_ids[index], ()))

    def launch(self) -> None:
        """Count the step's tokens as computed and its samples as expected."""
        plan, drafts = self.plan, self.plan.draft_token_ids
        plan.encoder = self.encoder.take_work()
        for request, num_tokens, is_sampled in zip(
            self.requests, plan.num_scheduled_tokens, plan.is_sampled, strict=True
        ):
            request.num_computed_tokens += num_tokens
            if is_sampled:
                request.num_output_placeholders += 1
                if drafts:
                    request.num_output_placeholders += len(drafts.get(request.request_id, ()))
            request.num_steps_in_flight += 1
            request.num_untold_tokens = 0
            if request.draft_token_ids:
                request.draft_token_ids = []

    def can_repeat(self, num_alive: int, max_num_seqs: int) -> bool:
        """Whether the next step can be this one again: nobody has left since, all that run are in
        it, and of the `num_alive` requests no other may start.
        """
        num_running = len(self.running)
        return (
            self.num_repeats > 0
            and len(self.requests) == num_running
            and (num_alive == num_running or num_running == max_num_seqs)
        )

    def repeat(self, step_id: int) -> Step:
        """The next step, launched. It shares what does not change: nobody writes to a plan that is
        made.
        """
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
            request.num_steps_in_flight += 1
        plan = self.plan
        if plan.is_repeated:
            again = replace(plan, step_id=step_id)
        else:
            again = SchedulerOutput(
                step_id,
                plan.req_ids,
                plan.rows,
                plan.num_scheduled_tokens,
                plan.num_logits,
                plan.is_sampled,
                is_repeated=True,
            )
        return replace(self, plan=again, num_repeats=self.num_repeats - 1)
