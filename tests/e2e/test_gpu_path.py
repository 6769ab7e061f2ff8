"""The engine on the parts of a GPU: what it generates is what the CPU's reference generates."""

from __future__ import annotations

import pytest

from helpers.gpu_engine import generate, gpu_engine
from helpers.tiny import write_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
"""Integers of a hash wrap, and padding is computed from whatever memory held before; numpy, which
the interpreter computes with, warns of both."""

PROMPTS = [[5, 9, 20], [(7 * i) % 390 + 3 for i in range(9)], [33], [5, 9, 5]]
"""Together few enough for one tile: the interpreter's products of larger tiles round otherwise, as
those of a GPU do not.
"""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=3, top_k=20, max_tokens=3, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.7, seed=4, max_tokens=4, min_tokens=4, top_p=0.9),
    SamplingParams(
        temperature=1.0,
        seed=5,
        max_tokens=5,
        ignore_eos=True,
        repetition_penalty=1.5,
        frequency_penalty=1.5,
        presence_penalty=1.0,
        logit_bias={5: 9.0, 9: 9.0, 30: 9.0},
        allowed_token_ids=[5, 9, 30, 31],
        logprob_token_ids=[5, 9],
    ),
]
"""The last one's tokens depend on those that the host has not seen when they are sampled."""


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(tiny_llama):
    """Each request by itself."""
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine = gpu_engine(tiny_llama, dtype="float32", num_kv_blocks=16, max_model_len=20)
        outputs += generate(engine, [prompt], [params])
    return outputs


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def logprobs_of(outputs):
    return [(output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def check_close(found, wanted):
    assert (found is None) == (wanted is None)
    for mine, theirs in zip(found or (), wanted or (), strict=True):
        assert (mine is None) == (theirs is None)
        assert list(mine or ()) == list(theirs or ())
        for token_id, entry in (mine or {}).items():
            assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)
            assert entry.rank == theirs[token_id].rank


def test_tokens_are_those_of_the_reference(tiny_llama, alone):
    with LLM(str(tiny_llama), dtype="float32", device="cpu", num_kv_blocks=16) as llm:
        want = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    assert tokens_of(alone) == tokens_of(want)
    for mine, theirs in zip(logprobs_of(alone), logprobs_of(want), strict=True):
        for found, wanted in zip(mine, theirs, strict=True):
            check_close(found, wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 4, "max_num_seqs": 3},
        {"num_kv_blocks": 5, "block_size": 4, "max_num_batched_tokens": 16},
        {"async_scheduling": False, "sizes": GraphSizes((2, 4), (16,), 3, 20), "max_num_seqs": 3},
    ],
    ids=["batched", "chunked", "preempted", "padded-and-one-step-in-flight"],
)
def test_the_same_bits_however_requests_are_run(tiny_llama, alone, settings):
    settings = {"num_kv_blocks": 16, "max_model_len": 20} | settings
    together = generate(gpu_engine(tiny_llama, dtype="float32", **settings), PROMPTS, PARAMS)
    num_preemptions = sum(output.metrics.num_preemptions for output in together)
    assert (num_preemptions > 0) == (settings["num_kv_blocks"] < 16)
    assert tokens_of(together) == tokens_of(alone)
    assert logprobs_of(together) == logprobs_of(alone)


FORMS = [{"choice": ["The quick brown fox", "The lazy dog"]}, {"regex": "[a-c]{3} brown"}, None]


def test_forms_hold_with_two_steps_in_flight(tiny_llama):
    """The mask of a step waits for the tokens of the one before; its forward pass does not."""
    params = [
        SamplingParams(
            structured_outputs=form, temperature=1.0, seed=20 + i, max_tokens=5, ignore_eos=True
        )
        for i, form in enumerate(FORMS)
    ]
    with LLM(str(tiny_llama), dtype="float32", device="cpu", num_kv_blocks=16) as llm:
        want = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]], params)
    settings = {"dtype": "float32", "num_kv_blocks": 16, "max_model_len": 20}
    engine = gpu_engine(tiny_llama, with_tokenizer=True, **settings)
    found = generate(engine, PROMPTS[:3], params)
    assert tokens_of(found) == tokens_of(want)
    assert [output.outputs[0].text for output in found] == [
        output.outputs[0].text for output in want
    ]
    assert found[0].outputs[0].text in FORMS[0]["choice"]


def test_float8_weights_and_cache_stay_near_bfloat16(tiny_llama):
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)]
    prompt = [PROMPTS[1]]
    settings = {"num_kv_blocks": 16, "max_model_len": 20}
    plain, small = (
        generate(gpu_engine(tiny_llama, **settings, **more), prompt, params)[0].prompt_logprobs
        for more in ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"})
    )
    found, wanted = (
        [entries[i][token].logprob for i, token in enumerate(prompt[0]) if i]
        for entries in (small, plain)
    )
    off = sum(abs(mine - theirs) for mine, theirs in zip(found, wanted, strict=True))
    # Weights are so large that logits spread over some 20; float8 has three bits of a value.
    assert 0 < off < 0.15 * sum(abs(value) for value in wanted)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
def test_a_warm_engine_gives_the_same(tiny_llama, alone):
    """What is compiled before the first request touches none of them.

    The padding of a blank step is whatever lies in memory; numpy warns of that.
    """
    engine = gpu_engine(
        tiny_llama,
        dtype="float32",
        num_kv_blocks=16,
        max_model_len=20,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    runner_of(engine).warm_up()
    outputs = generate(engine, PROMPTS[:1], PARAMS[:1])
    assert tokens_of(outputs) == tokens_of(alone)[:1]


def runner_of(engine):
    return engine._client.core._executor._worker.runner


@pytest.mark.parametrize("ahead", [None, True])
def test_drafts_change_nothing(tiny_llama, alone, ahead):
    """Prompt lookup on the host, checked on the device; one step is planned ahead if asked for."""
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "adaptive": False,
    }
    engine = gpu_engine(
        tiny_llama,
        dtype="float32",
        num_kv_blocks=16,
        max_model_len=20,
        async_scheduling=ahead,
        speculative_config=lookup,
    )
    outputs = generate(engine, PROMPTS, PARAMS)
    assert tokens_of(outputs) == tokens_of(alone)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_drafts_changes_nothing(tiny_llama, alone, ahead):
    """It drafts for itself, so that a slot with wrong keys shows: another draft would not hold."""
    engine = gpu_engine(
        tiny_llama,
        dtype="float32",
        num_kv_blocks=16,
        max_model_len=20,
        max_num_seqs=3,
        async_scheduling=ahead,
        speculative_config={
            "model": str(tiny_llama),
            "num_speculative_tokens": 2,
            "adaptive": False,
        },
    )
    outputs = generate(engine, PROMPTS, PARAMS)
    assert tokens_of(outputs) == tokens_of(alone)
    assert logprobs_of(outputs) == logprobs_of(alone)
    num_drafts = sum(output.metrics.num_draft_tokens for output in outputs)
    assert num_drafts == sum(output.metrics.num_accepted_tokens for output in outputs) > 4
