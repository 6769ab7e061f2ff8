"""Requests with a grammar, as scheduler and engine core treat them, on a device made of arithmetic.

The grammar here is a script: the only texts it knows are a few lists of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from helpers.core import create_request, create_scheduler
from helpers.fake_executor import EOS, FakeExecutor, endless
from tokenmill.contracts.plan import GrammarOutput
from tokenmill.contracts.request import FinishReason
from tokenmill.contracts.seams import GrammarProgress, NoGrammars
from tokenmill.engine.core import EngineCore
from tokenmill.errors import InvalidRequestError
from tokenmill.structured_outputs import StructuredOutputsParams

FORM = StructuredOutputsParams(regex="a")


@dataclass
class ScriptedGrammars:
    """A `GrammarManager` whose every text is a script: a token, or None for any token."""

    scripts: dict[str, list[int | None]] = field(default_factory=dict)
    force: bool = True
    slow: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    failures: list[tuple[str, InvalidRequestError]] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, object]] = field(default_factory=list)

    def add(self, request):
        self.places[request.request_id] = len(request.initial_output_ids)

    def remove(self, request_id):
        self.places.pop(request_id, None)

    def is_ready(self, request_id):
        return request_id not in self.slow

    def compiling(self):
        return list(self.slow)

    def take_failures(self):
        failures, self.failures = self.failures, []
        return failures

    def wait(self, request_id):
        pass

    def start(self, request_id, max_forced):
        return self._force(request_id, max_forced)

    def advance(self, request_id, token_ids, max_forced):
        script = self.scripts[request_id]
        for token_id in token_ids:
            place = self.places[request_id]
            refuses = request_id in self.refusing
            if refuses or place >= len(script) or script[place] not in (None, token_id):
                return GrammarProgress(error=f"token {token_id} is refused")
            self.places[request_id] += 1
        forced = self._force(request_id, max_forced)
        left = script[self.places[request_id] :]
        run = next((i for i, token in enumerate(left) if token is None), len(left))
        return GrammarProgress(
            forced_token_ids=forced,
            is_terminated=not left,
            num_forced_left=run if self.force else 0,
        )

    def cut_drafts(self, request_id, draft_ids):
        left = self.scripts[request_id][self.places[request_id] :]
        for place, (draft, wanted) in enumerate(zip(draft_ids, left, strict=False)):
            if wanted not in (None, draft):
                return list(draft_ids[:place])
        return list(draft_ids[: len(left)])

    def begin(self, plan):
        self.log.append(("begin", plan.step_id))

    def get_grammar_bitmask(self, plan):
        self.log.append(("mask", plan.step_id))
        if not plan.structured_req_ids:
            return None
        return GrammarOutput(list(plan.structured_req_ids), b"")

    def failure(self, request_id):
        return self.lost.get(request_id)

    def shutdown(self):
        pass

    def _force(self, request_id, max_forced):
        forced = []
        script = self.scripts[request_id]
        while self.force and len(forced) < max_forced:
            place = self.places[request_id]
            if place >= len(script) or script[place] is None:
                break
            forced.append(script[place])
            self.places[request_id] += 1
        return forced


class ScriptedExecutor(FakeExecutor):
    """The device's samples obey the scripts, as if masks were applied."""

    def __init__(self, grammars: ScriptedGrammars, **kwargs) -> None:
        super().__init__(next_token=endless, **kwargs)
        self.grammars = grammars

    def _sample(self, digests, drafts, end):
        # Which request it is shows in the row that is being computed.
        sampled = super()._sample(digests, drafts, end)
        script = self.grammars.scripts.get(self._req_id)
        if script is None:
            return sampled
        row = self._row
        place = len(row.token_ids) - row.data.num_prompt_tokens
        for i in range(len(sampled)):
            wanted = script[place + i] if place + i < len(script) else EOS
            if wanted is not None and wanted != sampled[i]:
                return [*sampled[:i], wanted]
        return sampled

    def _run_row(self, plan, index, output):
        self._row, self._req_id = self.rows[plan.rows[index]], plan.req_ids[index]
        return super()._run_row(plan, index, output)


def structured(prompt=5, **kwargs):
    request = create_request(prompt, **kwargs)
    params = request.sampling_params.replace(structured_outputs=FORM)
    return msgspec.structs.replace(request, sampling_params=params)


def create(scripts, *, depth=1, force=True, executor=None, **kwargs):
    grammars = ScriptedGrammars(scripts, force=force)
    scheduler = create_scheduler(max_steps_in_flight=depth, grammars=grammars, **kwargs)
    executor = executor or ScriptedExecutor(grammars, max_slots=scheduler.kv.num_usable_tokens)
    return EngineCore(scheduler, executor, depth, grammars), executor, grammars


def run(core, *requests):
    """Token ids and last output by request."""
    for request in requests:
        core.add_request(request)
    tokens = {request.request_id: [] for request in requests}
    last = {}
    for _ in range(500):
        if not core.has_requests():
            break
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            last[output.request_id] = output
    assert not core.has_requests()
    return tokens, last


SCRIPT = [11, 12, 13, None, 21, None, None, 31, 32, 33, 34, 35, None, 41]


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_save_steps_and_change_nothing(depth):
    results = []
    for force in (False, True):
        core, executor, _ = create({"a": SCRIPT}, depth=depth, force=force)
        tokens, last = run(core, structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
        assert last["a"].finish_reason is FinishReason.STOP
        results.append((tokens["a"], len(executor.plans)))
    (plain, num_plain), (forced, num_forced) = results
    assert plain == forced
    assert len(plain) == len(SCRIPT)
    assert num_forced < num_plain
    if depth == 1:
        # One step for each choice, and the first also computes the prompt.
        assert num_forced == SCRIPT.count(None)


def test_at_depth_two_a_request_holds_still_for_many_forced_tokens():
    core, executor, _ = create({"a": [None, *range(11, 21), None]}, depth=2)
    tokens, _ = run(core, structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
    assert tokens["a"][1:11] == list(range(11, 21))
    # The prompt; what was in flight when the run was seen; the rest of it, at once; and what was
    # in flight when the text was complete.
    assert [plan.num_scheduled_tokens for plan in executor.plans] == [[3], [1], [10], [1]]


def test_a_request_that_has_ended_leaves_no_grammar_behind():
    core, _, grammars = create({"a": [None] * 3, "b": [None] * 9, "c": [None] * 9})
    grammars.refusing.add("c")
    for name in "abc":
        core.add_request(structured(request_id=name, prompt=[5], max_tokens=9))
    core.step()
    assert set(grammars.places) == {"a", "b"}, "one has failed"
    core.abort_requests(["b"])
    assert set(grammars.places) == {"a"}
    while core.has_requests():
        core.step()
    assert not grammars.places


def test_forced_tokens_are_computed_as_one_chunk_with_the_next_sample():
    core, executor, _ = create({"a": [None, 11, 12, 13, None]})
    run(core, structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
    prompt, chunk = executor.plans
    assert prompt.num_scheduled_tokens == [3]
    assert chunk.num_scheduled_tokens == [4]
    assert chunk.num_logits == [1]
    assert chunk.scheduled_cached_reqs.appended_token_ids == [[11, 12, 13]]


def test_tokens_forced_at_the_start_are_part_of_the_first_chunk_and_of_the_first_output():
    core, executor, _ = create({"a": [11, 12, None, None]})
    core.add_request(structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
    (output,) = core.step().outputs
    assert executor.plans[0].num_scheduled_tokens == [5]
    assert executor.plans[0].scheduled_new_reqs[0].num_prompt_tokens == 3
    assert output.new_token_ids[:2] == [11, 12]
    assert len(output.new_token_ids) == 3


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9, 10])
@pytest.mark.parametrize("force", [False, True])
def test_the_length_counts_forced_tokens(max_tokens, force):
    core, _, _ = create({"a": SCRIPT}, force=force)
    tokens, last = run(core, structured(request_id="a", prompt=[5], max_tokens=max_tokens))
    assert len(tokens["a"]) == max_tokens
    assert last["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("force", [False, True])
def test_a_text_that_is_complete_on_its_last_token_ends_by_stop(force):
    core, _, _ = create({"a": SCRIPT}, force=force)
    tokens, last = run(core, structured(request_id="a", prompt=[5], max_tokens=len(SCRIPT)))
    assert len(tokens["a"]) == len(SCRIPT)
    assert last["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("force", [False, True])
def test_a_complete_text_ends_although_min_tokens_are_not_reached(force):
    core, _, _ = create({"a": [None, 12, None]}, force=force)
    request = structured(request_id="a", prompt=[5], max_tokens=50, min_tokens=40)
    tokens, last = run(core, request)
    assert len(tokens["a"]) == 3
    assert last["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2])
def test_b069_a_refused_token_ends_its_request_alone(depth):
    core, _, grammars = create({"a": [None] * 30, "b": [None] * 8}, depth=depth)
    core.add_request(structured(request_id="a", prompt=[5], max_tokens=8))
    core.add_request(structured(request_id="b", prompt=[6], max_tokens=8))
    core.step()
    grammars.refusing.add("a")
    outputs = []
    while core.has_requests():
        outputs += core.step().outputs
    last = {output.request_id: output for output in outputs}
    assert last["a"].finish_reason is FinishReason.ERROR
    assert "refused" in last["a"].error
    assert last["b"].finish_reason is FinishReason.STOP


def test_a_grammar_that_is_lost_says_why():
    core, executor, grammars = create({"a": [None] * 9, "b": [None] * 9})
    core.add_request(structured(request_id="a", prompt=[5], max_tokens=8))
    core.add_request(structured(request_id="b", prompt=[6], max_tokens=8))
    executor.errors |= {"a": "no usable logits", "b": "no usable logits"}
    grammars.lost["a"] = "too wild"
    outputs = {output.request_id: output for output in core.step().outputs}
    assert outputs["a"].error == "too wild"
    assert outputs["b"].error == "no usable logits"


def test_a_request_waits_for_its_grammar_and_holds_up_nobody():
    core, executor, grammars = create({"a": [None] * 4, "b": [None] * 4})
    grammars.slow.add("a")
    core.add_request(structured(request_id="a", prompt=[5], max_tokens=4))
    core.add_request(structured(request_id="b", prompt=[6], max_tokens=4))
    core.add_request(create_request(4, request_id="c", max_tokens=2))
    core.step()
    assert executor.plans[0].req_ids == ["b", "c"]
    assert core.scheduler.requests["a"].wait_reason == "grammar"
    grammars.slow.clear()
    core.step()
    assert "a" in executor.plans[1].req_ids


def test_a_grammar_that_cannot_be_had_takes_its_request_out():
    core, executor, grammars = create({"a": [None], "b": [None] * 2})
    grammars.slow.add("a")
    core.add_request(structured(request_id="a", prompt=[5], max_tokens=4))
    core.add_request(structured(request_id="b", prompt=[6], max_tokens=4))
    grammars.failures.append(("a", InvalidRequestError("no such form", parameter="x")))
    core.step()
    ((request_id, error),) = core.take_refusals()
    assert (request_id, error.parameter) == ("a", "x")
    assert core.take_refusals() == []
    assert executor.plans[0].req_ids == ["b"]
    assert "a" not in core.scheduler.requests


def test_waiting_for_grammars_raises_and_takes_all_of_the_call_out():
    core, _, grammars = create({"a": [None], "b": [None], "c": [None]})
    for name in "abc":
        core.add_request(structured(request_id=name, prompt=[5], max_tokens=4))
    grammars.failures += [
        (name, InvalidRequestError(f"no form {name}", parameter=name)) for name in "ac"
    ]
    with pytest.raises(InvalidRequestError, match="no form a"):
        core.wait_for_grammars(["a", "b"])
    assert list(core.scheduler.requests) == []
    assert [request_id for request_id, _ in core.take_refusals()] == ["c"]


def test_without_grammars_a_form_is_refused():
    scheduler = create_scheduler(grammars=NoGrammars())
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        scheduler.add_request(structured())
    assert not scheduler.has_requests()


def test_masks_are_begun_before_the_forward_pass_and_taken_after_it():
    core, executor, grammars = create({"a": [None] * 3})
    execute = executor.execute_model
    executor.execute_model = lambda plan: (
        grammars.log.append(("execute", plan.step_id)),
        execute(plan),
    )
    run(core, structured(request_id="a", prompt=[5], max_tokens=1))
    assert grammars.log == [("begin", 0), ("execute", 0), ("mask", 0)]


def test_at_depth_two_only_sampling_waits_for_the_step_before():
    """The next forward pass starts before the tokens of the last one are known."""
    core, executor, grammars = create({"a": [None] * 6}, depth=2)
    log = grammars.log
    execute, update = executor.execute_model, core.scheduler.update_from_output
    executor.execute_model = lambda plan: (log.append(("execute", plan.step_id)), execute(plan))

    def settle(plan, result):
        log.append(("settle", plan.step_id))
        return update(plan, result)

    core.scheduler.update_from_output = settle
    core.add_request(structured(request_id="a", prompt=[5], max_tokens=6))
    core.add_request(create_request(4, request_id="b", max_tokens=6))
    core.step()
    core.step()
    masked = [entry for entry in log if entry[0] != "begin"]
    assert masked[:7] == [
        ("execute", 0),
        ("mask", 0),
        ("execute", 1),
        ("settle", 0),
        ("mask", 1),
        ("execute", 2),
        ("settle", 1),
    ]
    # Both requests are in every step: the one without a grammar is not held up, and neither is
    # the other.
    assert all(plan.req_ids == ["a", "b"] for plan in executor.plans)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("force", [False, True])
def test_b075_preemption_changes_nothing(depth, force):
    scripts = dict.fromkeys("abcd", SCRIPT)
    requests = [
        structured(request_id=name, prompt=[5 + i] * 9, max_tokens=40)
        for i, name in enumerate("abcd")
    ]
    roomy, _, _ = create(scripts, depth=depth, force=force)
    expected, _ = run(roomy, *requests)
    tight, _, _ = create(scripts, depth=depth, force=force, num_blocks=12)
    tokens, last = run(tight, *requests)
    assert tight.scheduler.make_stats().num_preemptions > 0
    assert tokens == expected
    assert all(output.finish_reason is FinishReason.STOP for output in last.values())


@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 8, 10])
def test_a_request_that_is_taken_up_again_goes_on_where_it_was(num_before):
    core, _, _ = create({"a": SCRIPT})
    request = structured(request_id="a", prompt=[5, 6, 7], max_tokens=50)
    tokens, _ = run(core, request)
    again, _, _ = create({"a": SCRIPT})
    taken_up = msgspec.structs.replace(request, initial_output_ids=tokens["a"][:num_before])
    rest, last = run(again, taken_up)
    assert tokens["a"][:num_before] + rest["a"] == tokens["a"]
    assert last["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("force", [False, True])
def test_b112_drafts_are_cut_by_the_grammar(force):
    grammars = ScriptedGrammars({"a": SCRIPT}, force=force)
    scheduler = create_scheduler(grammars=grammars, num_speculative_tokens=3)
    executor = ScriptedExecutor(grammars, num_drafts=3, max_slots=scheduler.kv.num_usable_tokens)
    core = EngineCore(scheduler, executor, 1, grammars)
    tokens, last = run(core, structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
    plain, _, _ = create({"a": SCRIPT}, force=False)
    expected, _ = run(plain, structured(request_id="a", prompt=[5, 6, 7], max_tokens=50))
    assert tokens == expected
    assert last["a"].finish_reason is FinishReason.STOP
    drafted = [drafts for plan in executor.plans for drafts in plan.draft_token_ids.values()]
    assert drafted
    assert all(len(drafts) <= 2 for drafts in drafted), "no run of free tokens is longer"
