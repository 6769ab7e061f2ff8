"""Beam search against a search of everything, on a model whose probabilities are a function."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from helpers.fake_engine import engine_config
from tokenmill.entrypoints.beam_search import BeamSearch, BeamSearchParams
from tokenmill.errors import InvalidRequestError, UnknownArgumentError
from tokenmill.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

VOCAB = 6
END = 5
PROMPT = [1, 2, 3]


def log_probabilities(tokens):
    """Of what follows; float64, the same for the same tokens."""
    rng = np.random.default_rng([7, *tokens])
    logits = rng.normal(0, 1.5, VOCAB)
    return logits - np.log(np.exp(logits).sum())


def answer(prompt, count):
    """As an engine answers a request for one token and the `count` best."""
    tokens = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    values = log_probabilities(tokens)
    best = sorted(range(VOCAB), key=lambda i: (-values[i], i))[:count]
    position = {i: Logprob(float(values[i]), rank) for rank, i in enumerate(best, 1)}
    output = CompletionOutput(0, "", [best[0]], logprobs=[position], finish_reason="length")
    return RequestOutput("r", None, list(tokens), [output], True, metrics=RequestMetrics(0.0))


def run(search):
    num_asked = 0
    while not search.is_done:
        prompts = search.prompts()
        num_asked += len(prompts)
        search.advance([answer(each, search.request.logprobs) for each in prompts])
    return search.result(None), num_asked


def make(config=None, **params):
    chosen = {"beam_width": 2, "max_tokens": 4, **params}
    config = config or engine_config(max_logprobs=-1)
    return BeamSearch(PROMPT, BeamSearchParams(**chosen), config, (END,))


def everything(max_tokens, length_penalty, *, ends=True):
    """Every sequence that there is: (score, tokens)."""
    found = []
    ordinary = [t for t in range(VOCAB) if t != END] if ends else range(VOCAB)
    for length in range(1, max_tokens + 1):
        for body in itertools.product(ordinary, repeat=length - 1):
            lasts = range(VOCAB) if length == max_tokens else ([END] if ends else [])
            for last in lasts:
                tokens = [*body, last]
                total = sum(
                    log_probabilities([*PROMPT, *tokens[:i]])[token]
                    for i, token in enumerate(tokens)
                )
                counted = length - (ends and last == END)
                found.append((total / max(counted, 1) ** length_penalty, tokens))
    return sorted(found, key=lambda each: -each[0])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_a_wide_search_finds_the_best_there_is(length_penalty):
    """As wide as there are beginnings, no beam is ever given up."""
    width = (VOCAB - 1) ** 3
    output, _ = run(make(beam_width=width, max_tokens=4, length_penalty=length_penalty))
    want = everything(4, length_penalty)
    assert [sequence.token_ids for sequence in output.outputs[:20]] == [t for _, t in want[:20]]
    for sequence, (score, tokens) in zip(output.outputs, want, strict=False):
        length = len(tokens) - (tokens[-1] == END)
        found = sequence.cumulative_logprob / max(length, 1) ** length_penalty
        assert found == pytest.approx(score)
    assert [sequence.index for sequence in output.outputs] == list(range(width))


def test_one_beam_is_greedy():
    output, num_asked = run(make(beam_width=1, max_tokens=6, ignore_eos=True))
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(int(np.argmax(log_probabilities(tokens))))
    assert output.outputs[0].token_ids == tokens[len(PROMPT) :]
    assert output.outputs[0].finish_reason == "length"
    assert num_asked == 6


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_stopping_early_changes_nothing(monkeypatch, width, length_penalty):
    early, few = run(make(beam_width=width, max_tokens=9, length_penalty=length_penalty))
    monkeypatch.setattr(BeamSearch, "_can_improve", lambda self: True)
    late, many = run(make(beam_width=width, max_tokens=9, length_penalty=length_penalty))
    assert [s.token_ids for s in early.outputs] == [s.token_ids for s in late.outputs]
    assert few <= many
    assert length_penalty or few < many


def test_end_tokens_end_a_beam_unless_they_are_to_be_ignored():
    output, _ = run(make(beam_width=3, max_tokens=5, length_penalty=0.0))
    ended = [s for s in output.outputs if s.finish_reason == "stop"]
    assert ended
    for sequence in output.outputs:
        assert (END in sequence.token_ids) == (sequence.token_ids[-1] == END)
        assert (sequence.finish_reason == "stop") == (sequence.token_ids[-1] == END)
        assert len(sequence.logprobs) == len(sequence.token_ids)
        total = sum(
            p[t].logprob for p, t in zip(sequence.logprobs, sequence.token_ids, strict=True)
        )
        assert total == pytest.approx(sequence.cumulative_logprob)
    output, _ = run(make(beam_width=3, max_tokens=5, ignore_eos=True))
    assert {s.finish_reason for s in output.outputs} == {"length"}


def test_the_context_is_never_left():
    config = engine_config(max_logprobs=-1, max_model_len=len(PROMPT) + 2)
    output, _ = run(make(config, beam_width=2, max_tokens=None, ignore_eos=True))
    assert [len(s.token_ids) for s in output.outputs] == [2, 2]


def test_candidates_are_listed_as_many_as_asked():
    search = make(beam_width=2, max_tokens=2, ignore_eos=True)
    run(search)
    for count, least in ((0, 1), (1, 1), (3, 3)):
        for sequence in search.result(None, num_logprobs=count).outputs:
            for position, token_id in zip(sequence.logprobs, sequence.token_ids, strict=True):
                assert next(iter(position)) == token_id
                assert len(position) in (least, count + 1)


def test_a_failed_request_ends_the_search():
    search = make()
    search.advance([answer(PROMPT, 4)])
    failed = CompletionOutput(0, "", [], logprobs=[], finish_reason="error", error="broken")
    outputs = [answer(each, 4) for each in search.prompts()]
    outputs[1].outputs = [failed]
    search.advance(outputs)
    assert search.is_done
    output = search.result(None)
    assert {(s.finish_reason, s.error) for s in output.outputs} == {("error", "broken")}


def test_a_salt_goes_with_every_request():
    search = BeamSearch(
        {"prompt_token_ids": PROMPT, "cache_salt": "s"},
        BeamSearchParams(beam_width=2, max_tokens=3),
        engine_config(max_logprobs=-1),
        (END,),
    )
    assert search.prompts() == [{"prompt_token_ids": PROMPT, "cache_salt": "s"}]
    search.advance([answer(PROMPT, 4)])
    assert all(prompt["cache_salt"] == "s" for prompt in search.prompts())


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10**6}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output"),
    ],
)
def test_values_that_make_no_sense(params, name):
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **params})
    assert caught.value.parameter == name


def test_unknown_names_and_what_the_engine_does_not_give():
    with pytest.raises(UnknownArgumentError, match="Did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2, max_tokens=3)
    with pytest.raises(InvalidRequestError, match=r"beam_width=11 needs 22 .* at most 10 beams"):
        make(engine_config(), beam_width=11)
    with pytest.raises(InvalidRequestError, match="raw_logits"):
        make(engine_config(logprobs_mode="raw_logits"))
