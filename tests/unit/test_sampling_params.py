"""Validation of `SamplingParams`: value by value, before anything is queued."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tokenmill.entrypoints.cli.flags import field_docs
from tokenmill.errors import InvalidRequestError, UnknownArgumentError
from tokenmill.sampling_params import (
    GREEDY_EPSILON,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    RequestOutputKind,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("n", 1.5),
        ("n", True),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", NAN),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**63),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("seed", "1"),
        ("seed", 2**64),
        ("seed", np.array([1, 2])),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
        ("ignore_eos", 1),
        ("max_tokens", 0),
        ("max_tokens", 10**12),
        pytest.param("max_tokens", 10**5000, id="max_tokens-5000-digits"),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("logprobs", 2.0),
        ("prompt_logprobs", -2),
        ("presence_penalty", 3),
        ("presence_penalty", -2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("frequency_penalty", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", INF),
        ("repetition_penalty", 1e-7),
        ("repetition_penalty", None),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {1: INF}),
        ("logit_bias", {1: "5"}),
        ("logit_bias", {1: True}),
        ("logit_bias", {"9" * 30: 1}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", {3: 4}),
        ("allowed_token_ids", [1.0]),
        pytest.param("allowed_token_ids", range(MAX_ALLOWED_TOKEN_IDS + 1), id="allowed-too-many"),
        ("bad_words", [""]),
        ("bad_words", ""),
        ("bad_words", [1]),
        ("bad_words", 5),
        ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", ["x" * (MAX_BAD_WORD_LENGTH + 1)]),
        ("thinking_token_budget", -2),
        ("thinking_token_budget", 1.5),
        ("thinking_token_budget", True),
        ("logprob_token_ids", list(range(MAX_LOGPROB_TOKEN_IDS + 1))),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", 3),
        ("flat_logprobs", 1),
        ("stream_interval", 0),
        ("stream_interval", 1.5),
        ("skip_reading_prefix_cache", 1),
        ("skip_clone", "no"),
        ("extra_args", [1]),
        ("extra_args", {1: 2}),
        ("repetition_detection", {"min_count": 3}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", np.array([1, 2])),
        ("output_kind", 9),
        ("detokenize", None),
    ],
)
def test_b015_b127_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}=") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 300


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        seed=np.uint64(7),
        stop_token_ids=np.arange(2),
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=7, stop_token_ids=[0, 1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value", "normal"),
    [
        ("top_k", -1, 0),
        ("top_k", 10**9, 10**9),
        ("min_p", 1, 1.0),
        ("seed", -1, None),
        ("stop", "end", ["end"]),
        ("stop", [], None),
        ("stop", None, None),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", [5, 3, 5], [5, 3]),
        ("stop_token_ids", [], None),
        ("logprobs", True, 1),
        ("logprobs", False, None),
        ("logprobs", -1, -1),
        ("max_tokens", None, None),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1, 1.0),
        ("repetition_penalty", 1e6, 1e6),
        ("logit_bias", {"5": 200, 7: -1000}, {5: 100.0, 7: -100.0}),
        ("logit_bias", {}, None),
        ("allowed_token_ids", (5, 3, 5), [5, 3]),
        ("allowed_token_ids", None, None),
        ("bad_words", "word", ["word"]),
        ("bad_words", ["b", "a", "b"], ["b", "a"]),
        ("bad_words", [], None),
        ("thinking_token_budget", -1, None),
        ("thinking_token_budget", 0, 0),
        ("logprob_token_ids", [4, 4, 2], [4, 2]),
        ("logprob_token_ids", [], None),
        ("stream_interval", 3, 3),
        ("extra_args", {}, None),
        ("skip_clone", True, True),
        ("skip_reading_prefix_cache", None, None),
        ("truncate_prompt_tokens", -1, -1),
        ("output_kind", 1, RequestOutputKind.DELTA),
        ("temperature", 1, 1.0),
        ("temperature", 1e-3, 0.01),
    ],
)
def test_b006_b015_values_have_one_form(name: str, value: Any, normal: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == normal


def test_b013_tiny_temperatures_are_greedy() -> None:
    params = SamplingParams(temperature=1e-8, top_p=1e-4, top_k=3, min_p=0.5)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert not SamplingParams(temperature=1e-2).greedy


def test_rules_between_fields() -> None:
    with pytest.raises(InvalidRequestError, match="n=2: must be 1 for greedy"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequestError, match="min_tokens=20: must not exceed max_tokens"):
        SamplingParams(min_tokens=20, max_tokens=10)
    with pytest.raises(InvalidRequestError, match="needs detokenize"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20
    with pytest.raises(InvalidRequestError, match=r"logprobs=2: .* logprob_token_ids \(3\)"):
        SamplingParams(logprobs=2, logprob_token_ids=[1, 2, 3])
    assert SamplingParams(logprob_token_ids=[1, 2, 3]).logprobs == 3
    assert SamplingParams(logprobs=3, logprob_token_ids=[1, 2, 3]).logprobs == 3


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean 'temperature'") as caught:
        SamplingParams(temprature=1.0)
    assert isinstance(caught.value, TypeError | ValueError)


def test_they_are_frozen_and_change_by_replacing() -> None:
    params = SamplingParams(temperature=0.5)
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params.replace(top_p=0.5).top_p == 0.5
    with pytest.raises(InvalidRequestError, match="top_p"):
        params.replace(top_p=3)


def test_they_travel_unchanged() -> None:
    rich = SamplingParams(
        logit_bias={3: 1.5},
        allowed_token_ids=[1, 2],
        bad_words=["a"],
        repetition_detection={"max_pattern_size": 3},
        logprob_token_ids=[5],
        extra_args={"a": [1, "b"]},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rich), type=SamplingParams) == rich
    params = SamplingParams(n=2, stop=["a"], logprobs=3, output_kind=RequestOutputKind.DELTA)
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
    assert len(wire) < 50  # defaults are left out


def test_the_texts_of_the_fields_name_the_limits_in_force() -> None:
    docs = field_docs(SamplingParams)
    assert str(MAX_N) in docs["n"]
    assert str(MIN_TEMPERATURE) in docs["temperature"]
    assert f"{GREEDY_EPSILON:.5f}" in docs["temperature"]
    assert str(MAX_STOP_STRINGS) in docs["stop"]
    assert str(MAX_STOP_LENGTH) in docs["stop"]
    assert str(MAX_LOGIT_BIASES) in docs["logit_bias"]
    assert f"{MAX_LOGIT_BIAS:g}" in docs["logit_bias"]
    assert str(MAX_BAD_WORDS) in docs["bad_words"]
    assert str(MAX_LOGPROB_TOKEN_IDS) in docs["logprob_token_ids"]
    assert f"{MAX_REPETITION_PENALTY:.0f}" in docs["repetition_penalty"]
    assert f"{1 / MAX_REPETITION_PENALTY:.6f}" in docs["repetition_penalty"]
