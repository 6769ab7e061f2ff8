"""What a user may get wrong is refused here, by name, with the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.tiny import tiny_llama
from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import Machine
from tokenmill.config.resolve import resolve
from tokenmill.engine.input_processor import InputProcessor, ProcessedInput, child_seed
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.tokenizer import load_tokenizer

VOCAB = 400
MAX_LEN = 64
EOS = (2, 7)


def config(**settings: Any) -> EngineConfig:
    return resolve(
        EngineArgs(max_model_len=MAX_LEN, **settings),
        path="tiny",
        config={
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
        },
        tensor_shapes={},
        tensor_formats={},
        machine=Machine(2, 1 << 34, 1 << 34),
    )


def processor(*, tokenizer: bool = True, **settings: Any) -> InputProcessor:
    loaded = load_tokenizer(TokenizerData(directory=tiny_llama())) if tokenizer else None
    return InputProcessor(config(**settings), loaded, EOS)


def process(prompt: Any, by: InputProcessor | None = None, **params: Any) -> ProcessedInput:
    return (by or processor()).process("id", prompt, SamplingParams(**params))


def test_text_ids_and_dicts() -> None:
    text = process("The quick brown fox")
    assert text.prompt == "The quick brown fox"
    ids = text.prompt_token_ids
    assert process(ids).prompt_token_ids == ids
    assert process({"prompt": "The quick brown fox"}).prompt_token_ids == ids
    both = process({"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "a"})
    assert (both.prompt, both.prompt_token_ids) == ("shown", ids)
    assert both.children[0].cache_salt == "a"


@pytest.mark.parametrize(
    ("prompt", "parameter", "words"),
    [
        ("", "prompt", "no tokens"),
        ([], "prompt", "no tokens"),
        ({"prompt": ""}, "prompt", "no tokens"),
        (5, "prompt", "int"),
        (None, "prompt", "NoneType"),
        ({"promt": "x"}, "prompt", "Did you mean 'prompt'"),
        ({}, "prompt", "neither"),
        ({"prompt": 3}, "prompt", "must be a string"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids", "list of integers"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"prompt": "x", "cache_salt": 1}, "cache_salt", "non-empty"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt", "valid Unicode"),
        (b"abc", "prompt", "bytes"),
        (np.arange(3), "prompt", "tolist"),
        ([1, -1], "prompt_token_ids", "-1"),
        ([1, VOCAB], "prompt_token_ids", f"between 0 and {VOCAB - 1}"),
        ([1, 2**63], "prompt_token_ids", str(2**63)),
        ([1, "a"], "prompt_token_ids", "'a'"),
        ([1, True], "prompt_token_ids", "True"),
        ([1, 1.0], "prompt_token_ids", "1.0"),
        ("\ud800", "prompt", "not valid Unicode"),
    ],
)
def test_b019_b020_bad_prompts(prompt: Any, parameter: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(prompt)
    assert caught.value.parameter == parameter
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"request_id": ["id"]}, "request_id"),
        ({"params": {"temperature": 1}}, "sampling_params"),
        ({"arrival_time": "now"}, "arrival_time"),
        ({"arrival_time": float("nan")}, "arrival_time"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 10**5000}, "priority"),
    ],
    ids=["request_id", "params", "arrival_time", "nan", "priority", "5000-digits"],
)
def test_bad_arguments_do_not_reach_the_queue(arguments: dict[str, Any], parameter: str) -> None:
    given = {"request_id": "id", "prompt": "x", "params": SamplingParams(), **arguments}
    with pytest.raises(InvalidRequestError) as caught:
        processor().process(**given)
    assert caught.value.parameter == parameter


def test_ids_of_numpy_become_integers() -> None:
    ids = process(list(np.array([5, 6], np.int32))).prompt_token_ids
    assert ids == [5, 6]
    assert {type(token_id) for token_id in ids} == {int}


def test_b019_text_whose_tokens_the_model_does_not_have() -> None:
    tokenizer = load_tokenizer(TokenizerData(directory=tiny_llama()))
    narrow = InputProcessor(config(hf_overrides={"vocab_size": 300}), tokenizer, EOS)
    assert max(tokenizer.encode("The quick")) >= 300
    with pytest.raises(InvalidRequestError, match="between 0 and 299") as caught:
        process("The quick", narrow)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("params", "parameter", "words"),
    [
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids", str(VOCAB)),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": -1}, "logprobs", "whole vocabulary"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs", "at most 20"),
    ],
)
def test_b019_b027_bad_parameters(params: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process("x", **params)
    assert caught.value.parameter == parameter
    assert words in str(caught.value)


def test_b027_the_limit_can_be_lifted() -> None:
    unlimited = processor(max_logprobs=-1)
    assert process("x", unlimited, logprobs=-1, prompt_logprobs=-1).params.logprobs == -1


@pytest.mark.parametrize("length", [MAX_LEN - 2, MAX_LEN - 1, MAX_LEN, MAX_LEN + 1])
@pytest.mark.parametrize("max_tokens", [1, 2, None])
def test_b023_prompt_and_output_fit_the_context(length: int, max_tokens: int | None) -> None:
    prompt = [5] * length
    if length >= MAX_LEN:
        with pytest.raises(ContextLengthExceededError, match=f"{length} tokens.*={MAX_LEN} must"):
            process(prompt, max_tokens=max_tokens)
        return
    child = process(prompt, max_tokens=max_tokens).children[0]
    room = MAX_LEN - length
    assert child.max_tokens == min(max_tokens or room, room)


class NeverAsked:
    """A tokenizer that must not be reached."""

    max_token_chars = 8

    def encode(self, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")


def test_b095_megabytes_are_refused_before_tokenizing() -> None:
    by = InputProcessor(config(reasoning_parser="none"), NeverAsked(), EOS)
    with pytest.raises(ContextLengthExceededError, match="10000000 characters"):
        process("x" * 10_000_000, by)
    with pytest.raises(AssertionError, match="1 characters"):
        process("x", by)


def test_b100_truncation_keeps_the_last_tokens() -> None:
    prompt = list(range(3, 3 + MAX_LEN * 2))
    with pytest.raises(ContextLengthExceededError):
        process(prompt)
    assert process(prompt, truncate_prompt_tokens=16).prompt_token_ids == prompt[-16:]
    assert process(prompt[:5], truncate_prompt_tokens=16).prompt_token_ids == prompt[:5]
    most = process(prompt, truncate_prompt_tokens=-1, max_tokens=10).prompt_token_ids
    assert most == prompt[-(MAX_LEN - 10) :]
    with pytest.raises(ContextLengthExceededError):
        process(prompt, truncate_prompt_tokens=MAX_LEN)
    text = "word " * 1000
    assert len(process(text, truncate_prompt_tokens=8).prompt_token_ids) == 8


def test_end_ids_become_stop_ids() -> None:
    plain = process("x", stop_token_ids=[9]).children[0]
    assert (plain.eos_token_id, plain.stop_token_ids) == (2, [9, 7])
    assert plain.min_tokens_mask_ids == []
    ignoring = process("x", stop_token_ids=[9], ignore_eos=True).children[0]
    assert (ignoring.eos_token_id, ignoring.stop_token_ids) == (None, [9])


def test_b030_every_id_that_could_stop_is_masked_below_min_tokens() -> None:
    for ignore_eos in (False, True):
        child = process("x", min_tokens=3, stop_token_ids=[9], ignore_eos=ignore_eos).children[0]
        assert child.min_tokens_mask_ids == [2, 7, 9]


def test_b011_children_have_seeds_of_their_own() -> None:
    first, second = (process("x", n=4, seed=1) for _ in range(2))
    seeds = [child.seed for child in first.children]
    assert len(set(seeds)) == 4
    assert seeds[0] == 1
    assert seeds == [child.seed for child in second.children]
    assert len({child.request_id for child in first.children + second.children}) == 8
    assert child_seed(2, 1) != child_seed(1, 1)


def test_every_request_has_a_seed_from_the_engines() -> None:
    def drawn(seed: int) -> list[int]:
        by = processor(seed=seed)
        return [process("x", by).children[0].seed for _ in range(3)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 3
    assert process("x", seed=-5).children[0].seed == 2**64 - 5


def test_priority_needs_its_policy() -> None:
    params = SamplingParams()
    with pytest.raises(InvalidRequestError, match="priority=3 needs scheduling_policy"):
        processor().process("id", "x", params, priority=3)
    by = processor(scheduling_policy="priority")
    assert by.process("id", "x", params, priority=3).children[0].priority == 3
    with pytest.raises(InvalidRequestError, match="must be an integer"):
        by.process("id", "x", params, priority="high")


def test_without_a_tokenizer_ids_only() -> None:
    by = processor(tokenizer=False)
    assert process([1, 2], by).prompt_token_ids == [1, 2]
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        process("x", by)
    with pytest.raises(InvalidRequestError, match="use stop_token_ids"):
        process([1], by, stop="x")
