"""Images keep the promise: the same bits however a request is run, and transformers' tokens."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import write_adapter
from helpers.vision_families import VisionFamily
from helpers.vision_models import (
    mark_of,
    one_of_each_kind,
    picture,
    reference,
    reference_logits,
    saved,
)
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.contracts.request import EngineCoreRequest, MultiModalFeature
from tokenmill.engine.input_processor import child_seed
from tokenmill.errors import AdapterError
from tokenmill.lora_request import LoRARequest
from tokenmill.worker.graphs.decode import CheckedDecodeSteps

FAMILIES = ["llava", "smolvlm", "qwen3-vl"]
"""All placeholders take embeddings; some are tokens; tokens have three positions, and embeddings
values for several layers."""
CAT, DOG = picture(64, 48), picture(64, 48, seed=5)
WIDE = picture(90, 40, seed=7)

LONG = "The quick brown fox jumps over the lazy dog and sees " * 3 + "The quick"
"""Longer than a block of KV; the image behind it reaches into the next but one."""

over_families = pytest.mark.parametrize("name", FAMILIES)
over_all_kinds = pytest.mark.parametrize("name", [*FAMILIES, "gemma3"])
"""And tokens of an image see each other in both directions."""


def smallest_step(name: str, budget: int, num_seqs: int) -> int:
    """`budget` for so many requests, or more where an image is not cut."""
    return max(budget, 9 + num_seqs - 1) if name == "gemma3" else budget


def prompts(name: str) -> list[dict[str, Any]]:
    mark = mark_of(name)
    return [
        {
            "prompt": f"{LONG}{mark} there",
            "multi_modal_data": data,
        }
        for data in ({"image": CAT}, {"image": DOG}, {"image": [WIDE]})
    ] + [
        {"prompt": f"{mark}and{mark} are", "multi_modal_data": {"image": [CAT, DOG]}},
        {"prompt": "The quick brown fox jumps over nothing"},
        {"prompt": f"Twice{mark}, {mark}", "multi_modal_data": {"image": [WIDE, WIDE]}},
    ]


def params(name: str, logprobs: int | None = 2) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
    choices: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}]
    return [SamplingParams(seed=i, **common, **choices[i % 2]) for i in range(len(prompts(name)))]


def engine(name: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 320,
        "num_kv_blocks": 100,
        "block_size": 32,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
    }
    return LLM(str(saved(name)), **(defaults | settings))


Result = list[tuple[list[int], list[dict[int, float]]]]


def results(outputs: list[RequestOutput]) -> Result:
    return [
        (
            each.token_ids,
            [
                {token_id: entry.logprob for token_id, entry in position.items()}
                for position in each.logprobs or []
            ],
        )
        for output in outputs
        for each in output.outputs
    ]


@functools.cache
def alone(name: str, dtype: str = "float32") -> Result:
    with engine(name, dtype=dtype, enable_prefix_caching=False, enforce_eager=True) as llm:
        return [
            result
            for prompt, each in zip(prompts(name), params(name), strict=True)
            for result in results(llm.generate(prompt, each))
        ]


def processed(llm: LLM, prompt: dict[str, Any]) -> EngineCoreRequest:
    """A prompt as the core is asked."""
    return llm.llm_engine._input_processor.process("x", prompt, SamplingParams()).children[0]


def features(llm: LLM, prompt: dict[str, Any]) -> list[MultiModalFeature]:
    return processed(llm, prompt).mm_features


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine._client.core._executor._worker.runner


def encoder_of(llm: LLM) -> Any:
    return runner_of(llm)._inputs.items.encoder


@over_families
def test_another_image_is_another_prompt(name: str) -> None:
    first = [tokens for tokens, _ in alone(name)[:3]]
    assert first[0] != first[1] != first[2] != first[0]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAMILIES), ("qwen3-vl", "bfloat16")]
)
def test_all_at_once_recorded_and_in_native_steps(name: str, dtype: str) -> None:
    wanted = alone(name, dtype)
    with engine(name, dtype=dtype, check_graphs=True) as llm:
        assert results(llm.generate(prompts(name), params(name))) == wanted
        # Only those who ask for nothing but tokens decode in native steps.
        plain = llm.generate(prompts(name), params(name, logprobs=None))
        assert [tokens for tokens, _ in results(plain)] == [tokens for tokens, _ in wanted]
        runner = runner_of(llm)
        assert runner.graph_stats.num_replayed > 12
        assert isinstance(runner._decode_steps, CheckedDecodeSteps)


@pytest.mark.parametrize("budget", [3, 33])
@over_all_kinds
def test_in_chunks_with_borders_inside_of_images(name: str, budget: int) -> None:
    num_seqs = min(budget, 8)
    sizes = {
        "max_num_batched_tokens": smallest_step(name, budget, num_seqs),
        "max_num_seqs": num_seqs,
    }
    with engine(name, **sizes, max_num_encoder_input_tokens=1) as llm:
        assert results(llm.generate(prompts(name), params(name))) == alone(name)


@over_families
def test_with_room_for_one_image_at_a_time(name: str) -> None:
    with engine(name, enable_prefix_caching=False) as llm:
        largest = max(each.num_embeds for prompt in prompts(name) for each in features(llm, prompt))
    with engine(name, encoder_cache_size=largest, max_num_batched_tokens=16) as llm:
        assert results(llm.generate(prompts(name), params(name))) == alone(name)


@over_all_kinds
def test_from_the_prefix_cache(name: str) -> None:
    with engine(name) as llm:
        one, other = prompts(name)[:2]
        first = llm.generate(one, params(name)[0])
        assert first[0].num_cached_tokens == 0
        again = llm.generate(one, params(name)[0])
        assert results(again) == results(first) == alone(name)[:1]
        (image,) = features(llm, one)
        assert image.offset < again[0].num_cached_tokens
        different = llm.generate(other, params(name)[1])
        assert results(different) == alone(name)[1:2]
        assert 32 <= different[0].num_cached_tokens <= image.offset  # the text before the image
        assert results(llm.generate(prompts(name), params(name))) == alone(name)


def test_a_cached_prefix_may_end_within_an_image_that_sees_itself() -> None:
    """Its last tokens are computed over keys of the first, which have seen them."""
    with engine("gemma3") as llm:
        images = llm.llm_engine._input_processor.images
        assert images is not None
        ids = [*range(40, 67), images.mark_token_id, 50, 51, 52]  # the image's are 28 to 36 of 0...
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": CAT}}
        asked = params("gemma3")[0]
        first, again = (llm.generate(prompt, asked) for _ in range(2))
        assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 32)
        assert results(first) == results(again)
        other = {**prompt, "multi_modal_data": {"image": DOG}}
        different = llm.generate(other, asked)
        assert different[0].num_cached_tokens == 0
        assert results(different) != results(first)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_each_backend_lets_images_see_themselves(backend: str) -> None:
    with engine("gemma3", attention_backend=backend) as llm:
        (output,) = llm.generate(prompts("gemma3")[3], params("gemma3")[0])
    ids, token_ids = output.prompt_token_ids, output.outputs[0].token_ids
    logits = reference_logits("gemma3", ids + token_ids, [CAT, DOG])[len(ids) - 1 : -1]
    wanted = logits.log_softmax(-1)
    for row, token_id, step in zip(wanted, token_ids, output.outputs[0].logprobs, strict=True):
        assert abs(step[token_id].logprob - float(row[token_id])) < 1e-4


@over_all_kinds
def test_preempted(name: str) -> None:
    """In the middle of images, and behind them; where images have to be encoded again."""
    with engine(name, max_num_batched_tokens=16, max_num_seqs=4, encoder_cache_size=90) as llm:
        llm_engine = llm.llm_engine
        for number, (prompt, each) in enumerate(zip(prompts(name), params(name), strict=True)):
            llm_engine.add_request(str(number), prompt, each)
        ended, num_steps = {}, 0
        while llm_engine.has_unfinished_requests():
            num_steps += 1
            if num_steps in (5, 9, 17, 30, 40):
                llm_engine._client.core.scheduler.reset_prefix_cache(reset_running_requests=True)
            ended.update({each.request_id: each for each in llm_engine.step() if each.finished})
        outputs = [ended[str(number)] for number in range(len(ended))]
        assert results(outputs) == alone(name)
        assert sum(output.metrics.num_preemptions for output in outputs) > 5


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "", "num_speculative_tokens": 2}},
        {"enable_chunked_prefill": False, "max_num_encoder_input_tokens": 1},
    ],
    ids=["two steps in flight", "lookup", "a model that drafts", "no chunks"],
)
@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl", "gemma3"])
def test_beside_other_features(name: str, settings: dict[str, Any]) -> None:
    speculation = settings.get("speculative_config", {})
    if "model" in speculation:  # it sees no images, and drafts all the same
        settings = {"speculative_config": {**speculation, "model": str(saved(name))}}
    with engine(name, **settings) as llm:
        assert results(llm.generate(prompts(name), params(name))) == alone(name)


@over_families
def test_several_answers_to_one_prompt(name: str) -> None:
    prompt = prompts(name)[3]
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    with engine(name) as llm:
        together = llm.generate(prompt, SamplingParams(n=3, seed=11, **common))
        seeds = [child_seed(11, i) for i in range(3)]
        apart = [llm.generate(prompt, SamplingParams(seed=seed, **common)) for seed in seeds]
        assert results(together) == [result for each in apart for result in results(each)]


@over_all_kinds
def test_log_probabilities_of_a_prompt_with_images(name: str) -> None:
    asked = SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0)
    found = []
    for budget in (5, 512):
        step = smallest_step(name, budget, num_seqs=4)
        with engine(name, max_num_batched_tokens=step, max_num_seqs=4) as llm:
            (output,) = llm.generate(prompts(name)[3], asked)
            found.append((output.prompt_logprobs, results([output])))
    assert found[0] == found[1]
    assert len(found[0][0]) == len(output.prompt_token_ids)


@over_families
def test_a_form_behind_an_image(name: str) -> None:
    form = SamplingParams(max_tokens=12, structured_outputs={"regex": "(cat|dog) and (fox|hen)"})
    with engine(name) as llm:
        (output,) = llm.generate(prompts(name)[0], form)
    assert re.fullmatch("(cat|dog) and (fox|hen)", output.outputs[0].text)


@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl"])
def test_adapters_change_the_decoder_beside_images(name: str, tmp_path: Path) -> None:
    decoder = reference(name).model
    decoder = getattr(decoder, "language_model", None) or decoder.text_model
    prefix = "base_model.model.model.language_model."
    path = write_adapter(tmp_path / "a", decoder, targets=("q_proj", "down_proj"), prefix=prefix)
    adapter = LoRARequest("a", str(path))
    given = [adapter, None] * 3
    with engine(name, enable_lora=True, enable_prefix_caching=False) as llm:
        apart = [
            result
            for prompt, each, lora in zip(prompts(name), params(name), given, strict=True)
            for result in results(llm.generate(prompt, each, lora_request=lora))
        ]
        assert results(llm.generate(prompts(name), params(name), lora_request=given)) == apart
    assert apart[1::2] == alone(name)[1::2]
    assert all(one != other for one, other in zip(apart[::2], alone(name)[::2], strict=True))
    with engine(name, enable_lora=True, max_num_batched_tokens=7, max_num_seqs=4) as llm:
        assert results(llm.generate(prompts(name), params(name), lora_request=given)) == apart


def test_adapters_of_a_tower_are_refused_by_name(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", reference("llava"), targets=("q_proj",))
    with (
        engine("llava", enable_lora=True) as llm,
        pytest.raises(AdapterError, match=r"cannot be adapted: .*vision_tower"),
    ):
        llm.generate("x", lora_request=LoRARequest("a", str(path)))


def test_an_image_of_several_requests_is_encoded_once() -> None:
    with engine("llava") as llm:
        encoder = encoder_of(llm)
        encoded = []
        encode = encoder._model.encode
        encoder._model.encode = lambda *given: encoded.append(1) or encode(*given)
        llm.generate(prompts("llava") * 2, params("llava") * 2)
        assert (len(encoded), len(encoder)) == (3, 3)


def test_an_image_that_cannot_be_encoded_fails_its_requests_alone() -> None:
    with engine("llava") as llm:
        encoder = encoder_of(llm)
        encode, broken = encoder._model.encode, features(llm, prompts("llava")[1])[0].inputs

        def encode_or_fail(modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            if inputs["pixels"].numpy().tobytes() == broken["pixels"].data:
                raise RuntimeError("no memory for this")
            return encode(modality, inputs)

        encoder._model.encode = encode_or_fail
        found = results(llm.generate(prompts("llava"), params("llava")))
        healthy = [0, 2, 4, 5]
        assert [found[i] for i in healthy] == [alone("llava")[i] for i in healthy]
        assert [found[i] for i in (1, 3)] == [([], [])] * 2
        encoder._model.encode = encode
        assert results(llm.generate(prompts("llava"), params("llava"))) == alone("llava")


@pytest.mark.parametrize("family", one_of_each_kind())
def test_tokens_are_those_of_transformers(family: VisionFamily) -> None:
    name, mark = family.name, mark_of(family.name)
    images = [CAT, WIDE]
    prompt = {
        "prompt": f"The quick{mark} brown{mark} fox",
        "multi_modal_data": {"image": images},
    }
    with engine(name) as llm:
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))
    token_ids = output.outputs[0].token_ids
    logits = reference_logits(name, output.prompt_token_ids + token_ids, images)
    first = len(output.prompt_token_ids) - 1
    assert token_ids == logits[first:-1].argmax(-1).tolist()


@over_all_kinds
def test_a_prompt_may_end_with_an_image(name: str) -> None:
    """Its last token looks like one that decodes, where it is computed alone."""
    mark = mark_of(name)
    prompt = {"prompt": f"Look at{mark}", "multi_modal_data": {"image": CAT}}
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for budget in (1, 512):
        step = smallest_step(name, budget, num_seqs=1)
        with engine(name, max_num_batched_tokens=step, max_num_seqs=1) as llm:
            found.append(results(llm.generate(prompt, greedy)))
    assert found[0] == found[1]
