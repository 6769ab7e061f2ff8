"""An operator's own logits processors: finding, checking, running, failing."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from helpers.tiny import tiny_llama
from tokenmill import LLM, LogitsProcessor, SamplingParams
from tokenmill.contracts import logits_processor
from tokenmill.contracts.logits_processor import ProcessorContext, load_processors, make_processors
from tokenmill.errors import ConfigError, InvalidRequestError

CONTEXT = ProcessorContext(10, 4, "cpu")


class Only(LogitsProcessor):
    """`extra_args={"only": 7}` leaves one token; `{"count": True}` the number of tokens so far."""

    @classmethod
    def validate_params(cls, params):
        only = (params.extra_args or {}).get("only", 0)
        if not isinstance(only, int):
            raise ValueError(f"only={only!r} must be a token id.")

    def for_request(self, params):
        asked = params.extra_args or {}
        if "only" in asked:

            def keep(prompt_ids, output_ids, logits):
                kept = logits[asked["only"]].clone()
                logits.fill_(-float("inf"))
                logits[asked["only"]] = kept

            return keep
        if "count" in asked:

            def count(prompt_ids, output_ids, logits):
                logits[100 + len(output_ids)] = 1000.0
                assert prompt_ids.tolist() == [5, 6]

            return count
        if "fail" in asked:

            def fail(prompt_ids, output_ids, logits):
                raise ValueError("no such luck")

            return fail
        return None


def test_classes_paths_and_names(monkeypatch):
    module = types.ModuleType("some_processors")
    module.Only = Only
    monkeypatch.setitem(sys.modules, "some_processors", module)
    points = [EntryPoint("only", "some_processors:Only", logits_processor.ENTRY_POINTS)]
    monkeypatch.setattr(logits_processor, "entry_points", lambda group: points)
    assert load_processors([Only, "some_processors:Only", "only"]) == [Only] * 3
    (made,) = make_processors(["only"], CONTEXT)
    assert isinstance(made, Only)
    assert made.context == CONTEXT
    with pytest.raises(
        ConfigError, match=r"'onyl', which no .* one of: only\. Did you mean 'only'"
    ):
        load_processors(["onyl"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no_such_module:X", "ModuleNotFoundError"),
        ("math:nothing", "AttributeError"),
        ("math:sin", "no subclass"),
        (5, "no subclass"),
        ("nobody", "no installed package announces"),
    ],
)
def test_what_cannot_be_loaded(given, words):
    with pytest.raises(ConfigError, match=words):
        load_processors([given])


def test_what_cannot_be_made():
    class Broken(Only):
        def __init__(self, context):
            raise OSError("no file")

    with pytest.raises(ConfigError, match="Broken could not be made: OSError: no file"):
        make_processors([Broken], CONTEXT)


def test_a_whole_engine():
    def params(**extra_args):
        return SamplingParams(
            temperature=1, seed=1, max_tokens=4, ignore_eos=True, extra_args=extra_args
        )

    settings = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40}
    prompt = {"prompt_token_ids": [5, 6]}
    with LLM(str(tiny_llama()), **settings) as llm:
        plain = llm.generate([prompt], params())
        with pytest.raises(InvalidRequestError, match=r"extra_args=.* has none \(logits_proc"):
            llm.generate([prompt], params(only=3))
    for ahead in (False, True):
        with LLM(
            str(tiny_llama()), logits_processors=[Only], async_scheduling=ahead, **settings
        ) as llm:
            with pytest.raises(InvalidRequestError, match="only='x' must be a token id") as caught:
                llm.generate([prompt], params(only="x"))
            assert caught.value.parameter == "extra_args"
            outputs = llm.generate(
                [prompt] * 4, [params(), params(only=9), params(count=True), params(fail=1)]
            )
            tokens = [output.outputs[0].token_ids for output in outputs]
            assert tokens[0] == plain[0].outputs[0].token_ids
            assert tokens[1] == [9] * 4
            assert tokens[2] == [100, 101, 102, 103]
            assert outputs[3].outputs[0].finish_reason == "error"
            assert "no such luck" in outputs[3].outputs[0].error
