"""Every sampling parameter through a whole engine: the right tokens, however the engine runs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from helpers.sampling import edited, new_request, sample
from helpers.tiny import tiny_llama
from tokenmill import (
    LLM,
    BeamSearchParams,
    FlatLogprobs,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
)
from tokenmill.entrypoints.beam_search import BeamSearch
from tokenmill.errors import InvalidRequestError

PROMPTS = [
    [5, 9, 5, 20, 9, 5],
    [(7 * i) % 390 + 3 for i in range(40)],
    [33, 33],
    [5, 9, 5, 20, 9, 5, 7, 7, 7, 8, 8, 11, 5, 5, 19, 30, 5],
]
COMMON: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": -0.5},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "frequency_penalty": 1.0},
    {"temperature": 0, "logit_bias": {7: 20.0, 9: 18.0}, "presence_penalty": 2.0},
    {"temperature": 1, "seed": 5, "allowed_token_ids": [5, 9, 30, 31, 200]},
    {"temperature": 0, "min_tokens": 10, "stop_token_ids": [5, 9], "logit_bias": {5: 30.0}},
    {"temperature": 0, "bad_words": ["the", "quick brown"], "repetition_penalty": 1.1},
]
"""On each prompt."""


def engine(**settings: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 400, "block_size": 16}
    return LLM(str(tiny_llama()), device="cpu", **(defaults | settings))


def requests() -> tuple[list[Any], list[SamplingParams]]:
    pairs = [(prompt, asked) for asked in ASKED for prompt in PROMPTS]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
    return prompts, [SamplingParams(**{**COMMON, **asked}) for _, asked in pairs]


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[list[tuple[int, float]]]]]:
    return [
        (
            output.outputs[0].token_ids,
            [
                [(token_id, entry.logprob) for token_id, entry in position.items()]
                for position in output.outputs[0].logprobs or ()
            ],
        )
        for output in outputs
    ]


@functools.cache
def alone() -> Any:
    with engine(enable_prefix_caching=False) as llm:
        return [
            bits(llm.generate([prompt], params))[0]
            for prompt, params in zip(*requests(), strict=True)
        ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 8, "max_num_seqs": 5},
        {"num_kv_blocks": 12, "block_size": 16, "max_model_len": 96},
        {"num_kv_blocks": 12, "max_model_len": 96, "async_scheduling": True},
    ],
    ids=["together", "ahead", "chunked", "preempted", "preempted-ahead"],
)
def test_b028_b075_the_same_bits_however_it_runs(settings: dict[str, Any]) -> None:
    with engine(**settings) as llm:
        outputs = llm.generate(*requests())
    assert bits(outputs) == alone()
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (num_preemptions > 0) == ("num_kv_blocks" in settings)


def test_b028_warm_is_cold() -> None:
    with engine() as llm:
        first = llm.generate(*requests())
        again = llm.generate(*requests())
    assert sum(output.num_cached_tokens for output in again) > 0
    assert bits(first) == bits(again) == alone()


def test_the_prefix_cache_is_not_read_by_those_who_ask_not_to() -> None:
    prompt = {"prompt_token_ids": PROMPTS[1]}
    with engine(block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        alone, (skips,), (reads,) = (
            llm.generate([prompt], each)
            for each in (params, params.replace(skip_reading_prefix_cache=True), params)
        )
    assert (skips.num_cached_tokens, reads.num_cached_tokens) == (0, 32)
    assert bits([skips]) == bits([reads]) == bits(alone)


def test_b028_b075_tokens_are_those_of_a_slow_reference() -> None:
    """Penalties worked out from the ids, in float64, on the model's own logits of each step."""
    every = {"temperature": 0, "max_tokens": 1, "logprobs": -1}
    with engine(max_logprobs=-1, logprobs_mode="raw_logits") as llm:
        vocab_size = llm.llm_engine.config.model.vocab_size
        for asked in ASKED[:5]:
            prompt = PROMPTS[0]
            (output,) = llm.generate(
                [{"prompt_token_ids": prompt}], SamplingParams(**{**COMMON, **asked})
            )
            found = output.outputs[0].token_ids
            params = {**asked, "max_tokens": 40}
            seed = params.pop("seed", 0)
            request = new_request(token_ids=prompt, **params)
            steps = [{"prompt_token_ids": [*prompt, *found[:count]]} for count in range(len(found))]
            for count, step in enumerate(llm.generate(steps, SamplingParams(**every))):
                position = step.outputs[0].logprobs[0]
                logits = [position[token_id].logprob for token_id in range(vocab_size)]
                tokens = [*prompt, *found[:count]]
                want = edited(logits, request, tokens).tolist()
                token = sample(want, request.sampling_params, seed, len(tokens))
                assert found[count] == token, (asked, count)


def test_b016_biases_and_bounds() -> None:
    with engine() as llm:
        good = SamplingParams(temperature=0, max_tokens=4, logit_bias={9: 100}, ignore_eos=True)
        vocab_size = llm.llm_engine.config.model.vocab_size
        for name, value in (
            ("logit_bias", {vocab_size: 1}),
            ("allowed_token_ids", [vocab_size]),
            ("logprob_token_ids", [3, vocab_size]),
            ("stop_token_ids", [vocab_size]),
        ):
            with pytest.raises(InvalidRequestError, match=f"{name} holds {vocab_size}") as caught:
                llm.generate("x", SamplingParams(**{name: value}))
            assert caught.value.parameter == name
            (output,) = llm.generate("x", good)
            assert output.outputs[0].token_ids == [9] * 4


def test_b030_no_end_before_min_tokens() -> None:
    """All end ids of the model and the request's own are biased."""
    with engine(override_generation_config={"eos_token_id": [2, 17]}) as llm:
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            min_tokens=20,
            stop_token_ids=[23],
            stop=["e", "a", " "],
            logit_bias={2: 50, 17: 50, 23: 50},
        )
        (output,) = llm.generate("The quick", params)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 21
    assert not {2, 17, 23} & set(tokens[:20])
    assert output.outputs[0].finish_reason == "stop"


def test_bad_words_stay_out_of_the_text() -> None:
    with engine() as llm:
        plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        (output,) = llm.generate("The quick brown", plain)
        words = output.outputs[0].text.split()
        bad = [word for word in words if word.isalpha()][:3]
        assert bad
        (output,) = llm.generate("The quick brown", plain.replace(bad_words=bad))
    spelled = {
        tuple(llm.llm_engine.tokenizer.encode(prefix + w)) for w in bad for prefix in ("", " ")
    }
    tokens = output.outputs[0].token_ids
    for ids in spelled:
        for start in range(len(tokens)):
            assert tuple(tokens[start : start + len(ids)]) != ids


def test_repetitions_end_a_request() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=4)
    with engine() as llm:
        params = SamplingParams(
            temperature=0,
            max_tokens=60,
            ignore_eos=True,
            allowed_token_ids=[5],
            repetition_detection=detection,
        )
        (output,) = llm.generate("The", params)
        assert output.outputs[0].token_ids == [5] * 8
        assert output.outputs[0].finish_reason == "repetition"
        (output,) = llm.generate("The", params.replace(min_tokens=20))
        assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize("ahead", [False, True])
def test_reasoning_ends_when_its_budget_is_spent(ahead: bool) -> None:
    """The marks are several tokens of this model; one prompt opens the reasoning, one does not."""
    with engine(reasoning_parser="qwen3", async_scheduling=ahead) as llm:
        tokenizer = llm.llm_engine.tokenizer
        assert tokenizer is not None
        start, end = (
            tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>")
        )
        assert len(end) > 1
        params = SamplingParams(temperature=1, seed=2, max_tokens=30, ignore_eos=True)
        opened = {"prompt_token_ids": [5, 9, *start]}
        for budget in (0, 1, 7):
            asked = params.replace(thinking_token_budget=budget)
            outputs = llm.generate([opened, {"prompt_token_ids": [5, 9]}], asked)
            tokens = outputs[0].outputs[0].token_ids
            assert tokens[budget : budget + len(end)] == end
            plain = llm.generate([opened, {"prompt_token_ids": [5, 9]}], params)
            assert tokens[:budget] == plain[0].outputs[0].token_ids[:budget]
            assert bits(outputs[1:]) == bits(plain[1:])
    with engine() as llm, pytest.raises(InvalidRequestError, match="reasoning_parser"):
        llm.generate("x", SamplingParams(thinking_token_budget=3))


def test_logprobs_of_ids_that_were_named() -> None:
    named = [9, 300, 5]
    with engine(max_logprobs=-1) as llm:
        every = SamplingParams(temperature=1, seed=1, max_tokens=5, logprobs=-1, ignore_eos=True)
        some = every.replace(logprobs=None, logprob_token_ids=named)
        (full,), (part,) = llm.generate(["The"], every), llm.generate(["The"], some)
        assert full.outputs[0].token_ids == part.outputs[0].token_ids
        for all_of, listed, chosen in zip(
            full.outputs[0].logprobs,
            part.outputs[0].logprobs,
            part.outputs[0].token_ids,
            strict=True,
        ):
            assert list(listed) == list(dict.fromkeys([chosen, *named]))
            for token_id, entry in listed.items():
                assert entry.logprob == all_of[token_id].logprob
                assert entry.rank == sum(
                    other.logprob >= entry.logprob for other in all_of.values()
                )


def test_processed_log_probabilities_are_those_of_what_is_drawn_from() -> None:
    params = SamplingParams(
        temperature=0.7, seed=1, top_k=6, max_tokens=8, logprobs=-1, ignore_eos=True
    )
    logits_of: dict[str, list[dict[int, float]]] = {}
    for mode in ("raw_logits", "processed_logits", "processed_logprobs"):
        with engine(max_logprobs=-1, logprobs_mode=mode) as llm:
            (output,) = llm.generate(["The"], params)
        logits_of[mode] = [
            {token_id: entry.logprob for token_id, entry in position.items()}
            for position in output.outputs[0].logprobs or ()
        ]
    for raw, logits, logprobs in zip(*logits_of.values(), strict=True):
        kept = sorted(raw, key=lambda token_id: -raw[token_id])[:6]
        assert [token_id for token_id, value in logits.items() if value > -np.inf] == list(
            dict.fromkeys([next(iter(logits)), *kept])
        )
        scaled = np.array([raw[token_id] / 0.7 for token_id in kept])
        np.testing.assert_allclose([logits[token_id] for token_id in kept], scaled, rtol=1e-5)
        want = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
        np.testing.assert_allclose([logprobs[token_id] for token_id in kept], want, atol=1e-5)


def test_flat_log_probabilities_say_the_same() -> None:
    with engine() as llm:
        params = SamplingParams(
            temperature=1, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True
        )
        (plain,) = llm.generate(["The quick"], params)
        (flat,) = llm.generate(["The quick"], params.replace(flat_logprobs=True))
    found = flat.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    assert list(found) == plain.outputs[0].logprobs
    assert list(found[1:4]) == plain.outputs[0].logprobs[1:4]
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.prompt_logprobs) == [{}, *plain.prompt_logprobs[1:]]


def test_b011_samples_of_a_prompt_differ_and_come_again() -> None:
    with engine() as llm:
        params = SamplingParams(n=4, seed=1, temperature=1, max_tokens=8, presence_penalty=0.5)
        (first,), (second,) = llm.generate(["The"], params), llm.generate(["The"], params)
    texts = [sequence.token_ids for sequence in first.outputs]
    assert len({tuple(each) for each in texts}) == 4
    assert texts == [sequence.token_ids for sequence in second.outputs]


# ---- beam search ---------------------------------------------------------------------------------


def test_beam_search_is_transformers_beam_search() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32)
    prompt, width = [5, 9, 20, 33], 4
    want = reference.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=10,
        do_sample=False,
        early_stopping="never",
        length_penalty=1.0,
        eos_token_id=reference.config.eos_token_id,
        pad_token_id=0,
    )
    with engine() as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=10)
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    found = [sequence.token_ids for sequence in output.outputs]
    best = want[0].tolist()[len(prompt) :]
    assert found[0] == best[: len(found[0])]
    scores = [s.cumulative_logprob / len(s.token_ids) for s in output.outputs]
    assert scores == sorted(scores, reverse=True)


def test_beams_share_the_blocks_of_their_prompt() -> None:
    prompt = {"prompt_token_ids": [(7 * i) % 390 + 3 for i in range(65)]}
    with engine(block_size=16) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
        cached: list[int] = []
        advance = BeamSearch.advance

        def watched(self: BeamSearch, outputs: Any) -> None:
            cached.append(min(output.num_cached_tokens for output in outputs))
            advance(self, outputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BeamSearch, "advance", watched)
            (output,) = llm.beam_search([prompt], params)
        assert len(output.outputs) == 3
        assert cached[0] == 0
        assert min(cached[1:]) >= 64
        # Behind the prompt, too, the full blocks of a beam's own beginning.
        assert cached[-1] >= 80


def test_beam_search_of_several_prompts_and_texts() -> None:
    with engine() as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=5)
        together = llm.beam_search(["The quick", "One two", "x"], params, concurrency_limit=2)
        for text, output in zip(["The quick", "One two", "x"], together, strict=True):
            (single,) = llm.beam_search(text, params)
            assert [s.token_ids for s in single.outputs] == [s.token_ids for s in output.outputs]
            assert output.prompt == text
            assert all(sequence.text for sequence in output.outputs)
        with pytest.raises(InvalidRequestError, match="must be BeamSearchParams"):
            llm.beam_search("x", SamplingParams())  # type: ignore[arg-type]
