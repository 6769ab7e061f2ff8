"""All requests of an engine: readiness, masks of a step, reasoning, ends."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from helpers.grammar_walk import EOS, llguidance_backend, request_for, walk_tokenizer
from tokenmill.config.structured_outputs import (
    StructuredOutputsConfig,
    read_structured_outputs_config,
)
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import TokenRules
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.structured_output.manager import StructuredOutputManager
from tokenmill.structured_outputs import StructuredOutputsParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers

VOCAB_SIZE = walk_tokenizer().vocab_size


def encode(text: str) -> list[int]:
    return walk_tokenizer().encode(text, add_special_tokens=False)


def manager_of(**config) -> StructuredOutputManager:
    return StructuredOutputManager(
        StructuredOutputsConfig(**config), llguidance_backend, vocab_size=VOCAB_SIZE
    )


def request(name: str, regex: str = "abc", **changes):
    made = request_for(StructuredOutputsParams(regex=regex), **changes)
    return msgspec.structs.replace(made, request_id=name)


def add(manager: StructuredOutputManager, *requests) -> None:
    for each in requests:
        manager.add(each)
    for each in requests:
        manager.wait(each.request_id)
    assert manager.take_failures() == []


def plan_of(*names: str, step: int = 0, **drafts) -> SchedulerOutput:
    return SchedulerOutput(step, structured_req_ids=list(names), draft_token_ids=drafts)


def masks(manager: StructuredOutputManager, plan: SchedulerOutput) -> dict[str, list[list[int]]]:
    """Allowed ids of each of the rows of each request."""
    output = manager.get_grammar_bitmask(plan)
    if output is None:
        return {}
    rows = np.frombuffer(output.bitmask, "<i4").reshape(-1, -(-VOCAB_SIZE // 32))
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    ids = [np.flatnonzero(row).tolist() for row in bits]
    found: dict[str, list[list[int]]] = {}
    for name in output.req_ids:
        count = 1 + len(plan.draft_token_ids.get(name, ()))
        found[name], ids = ids[:count], ids[count:]
    assert ids == []
    return found


def test_a_request_is_ready_once_its_grammar_is_compiled():
    manager = manager_of()
    manager.add(request("a"))
    assert not manager.is_ready("a")
    assert manager.is_ready("nobody")
    assert manager.compiling() == ["a"]
    manager.wait("a")
    assert manager.take_failures() == []
    assert manager.is_ready("a")
    assert manager.compiling() == []
    manager.remove("a")
    manager.remove("a")


def test_a_failure_is_told_once_and_never_becomes_ready():
    manager = manager_of()
    manager.add(request("a", regex="("))
    manager.wait("a")
    ((name, error),) = manager.take_failures()
    assert name == "a"
    assert error.parameter == "structured_outputs.regex"
    assert manager.take_failures() == []
    assert not manager.is_ready("a")


def test_masks_are_the_same_whether_begun_ahead_or_not():
    manager = manager_of()
    add(manager, request("a", "[xy]"), request("b", "[0-9]+"))
    plan = plan_of("b", "a")
    manager.begin(plan)
    ahead = masks(manager, plan)
    assert ahead == masks(manager, plan_of("b", "a", step=1))
    assert list(ahead) == ["b", "a"]
    assert ahead["a"] == [sorted(encode("x") + encode("y"))]


def test_masks_of_another_plan_are_not_taken_for_this_one():
    manager = manager_of()
    add(manager, request("a", "[xy]"), request("b", "[0-9]"))
    manager.begin(plan_of("a", step=0))
    assert list(masks(manager, plan_of("b", step=1))) == ["b"]


def test_who_has_ended_meanwhile_is_left_out():
    manager = manager_of()
    add(manager, request("a"), request("b"))
    manager.remove("a")
    assert list(masks(manager, plan_of("a", "b"))) == ["b"]
    manager.remove("b")
    assert masks(manager, plan_of("a", "b")) == {}


@pytest.mark.parametrize("others", [(), ("b",)])
def test_drafts_have_a_row_each_and_one_behind_them(others):
    manager = manager_of(enable_forced_tokens=False)
    add(manager, request("a", "[ab]c?d"), request("b", "[0-9]"))
    drafts = encode("a")
    found = masks(manager, plan_of("a", *others, a=drafts))["a"]
    first, second = found
    assert first == sorted(encode("a") + encode("b"))
    assert second == sorted(encode("c") + encode("d"))
    assert masks(manager, plan_of("a"))["a"] == [first]
    assert manager.cut_drafts("a", encode("a") + encode("x")) == drafts


def test_a_draft_that_completes_the_text_is_left_to_be_sampled():
    """Nothing may be sampled behind it; and the grammar stands where it stood."""
    manager = manager_of(enable_forced_tokens=False)
    add(manager, request("a", "a[bc]"))
    assert manager.cut_drafts("a", encode("a") + encode("b")) == encode("a")
    assert manager.cut_drafts("a", encode("a") + encode("b")) == encode("a")
    assert not manager.advance("a", encode("a"), 0).is_terminated
    assert manager.cut_drafts("a", encode("b")) == []
    assert manager.advance("a", encode("b"), 0).is_terminated


def test_the_text_ends_with_the_form():
    manager = manager_of()
    add(manager, request("a", "a[bc]"))
    progress = manager.advance("a", encode("a"), 0)
    assert not progress.is_terminated
    progress = manager.advance("a", encode("b"), 0)
    assert progress.is_terminated


def test_a_refused_token_is_an_error():
    manager = manager_of()
    add(manager, request("a", "a[bc]"))
    assert manager.advance("a", encode("x"), 0).error


def test_a_matcher_that_is_lost_allows_nothing_and_says_why():
    manager = manager_of()
    add(manager, request("a", "((a{1,100}){1,100}){1,100}"), request("b", "[xy]"))
    for _ in range(100):
        assert manager.failure("a") is None
        if not masks(manager, plan_of("a"))["a"][0]:
            break
        manager.advance("a", encode("a"), 0)
    assert "cannot go on" in manager.failure("a")
    assert masks(manager, plan_of("a", "b")) == {
        "a": [[]],
        "b": [sorted(encode("x") + encode("y"))],
    }
    assert manager.failure("b") is None
    assert manager.failure("nobody") is None


def test_forced_tokens_are_counted_and_taken_as_far_as_there_is_room():
    text = "The quick brown fox"
    tokens = encode(text)
    manager = manager_of()
    add(manager, request("a", f"{text}[ab]"), request("b", f"{text}[ab]"))
    assert manager.start("a", 2) == tokens[:2]
    progress = manager.advance("b", tokens[:1], 0)
    assert (progress.forced_token_ids, progress.num_forced_left) == ([], len(tokens) - 1)
    progress = manager.advance("b", tokens[1:2], 100)
    assert progress.forced_token_ids == tokens[2:]


def test_a_text_without_any_choice_leaves_its_last_token_to_be_sampled():
    tokens = encode("The quick brown fox")
    manager = manager_of()
    add(manager, request("a", "The quick brown fox"))
    assert manager.start("a", 100) == tokens[:-1]
    assert masks(manager, plan_of("a"))["a"] == [tokens[-1:]]
    assert manager.advance("a", tokens[-1:], 100).is_terminated


@pytest.mark.parametrize(
    "changes",
    [
        {"params": {"logprobs": 0}},
        {"params": {"prompt_logprobs": 0}},
        {"params": {"bad_words": ["x"]}},
        {"params": {"allowed_token_ids": [1]}},
    ],
)
def test_whoever_watches_each_token_gets_none_forced(changes):
    manager = manager_of()
    add(manager, request("a", "The quick brown fox", **changes))
    assert manager.start("a", 100) == []
    assert masks(manager, plan_of("a"))["a"] == [encode("The")]


def test_the_setting_switches_forced_tokens_off():
    manager = manager_of(enable_forced_tokens=False)
    add(manager, request("a", "The quick brown fox"))
    assert manager.start("a", 100) == []
    progress = manager.advance("a", encode("The"), 100)
    assert (progress.forced_token_ids, progress.num_forced_left) == ([], 0)


def test_stop_ids_are_allowed_where_the_text_may_end():
    manager = manager_of()
    add(manager, request("a", "ab?", stop_token_ids=[1]))
    assert masks(manager, plan_of("a"))["a"] == [encode("a")]
    manager.advance("a", encode("a"), 0)
    assert masks(manager, plan_of("a"))["a"] == [sorted([1, EOS, *encode("b")])]


def test_ignored_ends_are_masked_as_long_as_the_text_can_go_on():
    manager = manager_of()
    add(manager, request("a", "ab*", params={"ignore_eos": True}))
    add(manager, request("b", "(ab)?", params={"ignore_eos": True}))
    manager.advance("a", encode("a"), 0)
    assert masks(manager, plan_of("a"))["a"] == [encode("b")]
    assert EOS not in masks(manager, plan_of("b"))["b"][0]
    assert manager.advance("b", encode("ab"), 0).is_terminated
    assert masks(manager, plan_of("b"))["b"] == [[EOS]]


def test_output_so_far_counts():
    manager = manager_of()
    add(manager, request("a", "a[bc]", initial_output_ids=encode("a")))
    assert masks(manager, plan_of("a"))["a"] == [sorted(encode("b") + encode("c"))]
    manager.add(request("b", "a[bc]", initial_output_ids=encode("x")))
    manager.wait("b")
    ((name, error),) = manager.take_failures()
    assert name == "b"
    assert "does not fit" in str(error)


# ---- reasoning ----------------------------------------------------------------------------------

START, END = 0, 1
THINK = ReasoningMarkers((START,), (END,))


def reasoning_request(name: str, prompt: list[int], markers: ReasoningMarkers = THINK, **changes):
    made = request(name, "a[bc]", token_rules=TokenRules(reasoning=markers), **changes)
    return msgspec.structs.replace(made, prompt_token_ids=prompt)


def test_the_form_begins_behind_the_reasoning_that_the_prompt_has_opened():
    manager = manager_of()
    add(manager, reasoning_request("a", [5, START]))
    assert masks(manager, plan_of("a")) == {}
    assert manager.start("a", 100) == []
    manager.advance("a", encode("anything"), 100)
    assert masks(manager, plan_of("a")) == {}
    progress = manager.advance("a", [END], 100)
    assert progress.forced_token_ids == encode("a")
    assert masks(manager, plan_of("a"))["a"] == [sorted(encode("b") + encode("c"))]


def test_several_ids_may_end_the_reasoning():
    manager = manager_of()
    ends = tuple(encode("xyz"))
    assert len(ends) > 1
    add(manager, reasoning_request("a", [5, START], ReasoningMarkers((START,), ends)))
    manager.advance("a", [*ends[:-1], 7, *ends[:-1]], 0)
    assert masks(manager, plan_of("a")) == {}
    manager.advance("a", [ends[-1]], 0)
    assert masks(manager, plan_of("a"))["a"] == [encode("a")]


def test_a_model_may_open_the_reasoning_or_begin_the_form():
    manager = manager_of()
    add(manager, reasoning_request("a", [5]), reasoning_request("b", [5]))
    assert masks(manager, plan_of("a"))["a"] == [sorted([START, *encode("a")])]
    assert manager.start("a", 100) == []
    manager.advance("a", [START, 9, 9], 0)
    assert masks(manager, plan_of("a")) == {}
    manager.advance("b", encode("a"), 0)
    assert masks(manager, plan_of("b"))["b"] == [sorted(encode("b") + encode("c"))]


def test_a_prompt_that_closes_the_reasoning_is_followed_by_the_form():
    manager = manager_of()
    add(manager, reasoning_request("a", [5, START, END]))
    assert masks(manager, plan_of("a"))["a"] == [encode("a")]


def test_the_form_may_hold_while_a_model_reasons():
    manager = manager_of(enable_in_reasoning=True)
    add(manager, reasoning_request("a", [5, START]))
    assert masks(manager, plan_of("a"))["a"] == [encode("a")]


def test_output_so_far_may_have_ended_the_reasoning():
    manager = manager_of()
    so_far = [9, 9, END, *encode("a")]
    add(manager, reasoning_request("a", [5, START], initial_output_ids=so_far))
    assert masks(manager, plan_of("a"))["a"] == [sorted(encode("b") + encode("c"))]


def test_drafts_end_before_the_end_of_reasoning():
    manager = manager_of()
    add(manager, reasoning_request("a", [5, START]), reasoning_request("b", [5]))
    assert manager.cut_drafts("a", [7, 8, END, 9]) == [7, 8]
    assert manager.cut_drafts("b", encode("a")) == []


# ---- settings -----------------------------------------------------------------------------------


def test_settings_are_checked():
    assert read_structured_outputs_config({}).backend == "llguidance"
    assert read_structured_outputs_config({"backend": "guidance"}).backend == "llguidance"
    for given, message in [
        ({"backend": "outlines"}, "is not one of"),
        ({"backend": 3}, "must be a string"),
        ({"enable_forced_token": True}, "Did you mean 'enable_forced_tokens'"),
        ({"enable_forced_tokens": 1}, "must be True or False"),
        ({"compile_timeout": 0}, "must be more than 0"),
        ({"compile_timeout": float("inf")}, "at most"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_structured_outputs_config(given)


def test_the_engines_white_space_holds_where_a_request_says_nothing():
    manager = manager_of(disable_any_whitespace=True, disable_additional_properties=True)
    array = {"type": "array", "items": {"const": 1}, "minItems": 1}
    compact = request_for(StructuredOutputsParams(json=array))
    spaced = request_for(StructuredOutputsParams(json=array, whitespace_pattern="[ ]"))
    blank = encode(" ")[0]
    for name, made, allows in (("a", compact, False), ("b", spaced, True)):
        add(manager, msgspec.structs.replace(made, request_id=name))
        manager.advance(name, encode("["), 0)
        assert (blank in masks(manager, plan_of(name))[name][0]) is allows
    closed = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"const": 1}}})
    add(manager, msgspec.structs.replace(request_for(closed), request_id="c"))
    manager.advance("c", encode('{"'), 0)
    assert masks(manager, plan_of("c"))["c"] == [encode("a")]


def test_an_engine_without_a_backend_refuses_each_request():
    def make():
        raise ConfigError("no library")

    manager = StructuredOutputManager(StructuredOutputsConfig(), make, vocab_size=VOCAB_SIZE)
    manager.add(request("a"))
    manager.wait("a")
    ((_, error),) = manager.take_failures()
    assert isinstance(error, InvalidRequestError)
    assert "no library" in str(error)
    manager.shutdown()
