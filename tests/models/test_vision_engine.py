"""Prompts with images through an engine, on small random weights: transformers' tokens and
log-probabilities by its own processors, and the same bits however a request is run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from helpers.models import model_config
from helpers.vision_families import VISION_FAMILIES, VisionFamily
from helpers.vision_models import (
    family_of,
    load,
    one_of_each_kind,
    picture,
    processor_of,
    reference_logits,
    saved,
    tensors,
)
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import InvalidRequestError
from tokenmill.kernels import native
from tokenmill.models.loader import load_model, tensor_shapes, weight_slots
from tokenmill.models.refill import Refill
from tokenmill.quantization.pack_checkpoint import pack_checkpoint

MAX_TOKENS = 8
BLOCK_SIZE = 32

over_families = pytest.mark.parametrize("family", VISION_FAMILIES, ids=lambda family: family.name)

IMAGES = [picture(64, 48, 1), picture(20, 31, 2), picture(64, 48, 3)]
Asked = tuple[str, list[Image.Image]]
"""A text with {} where an image belongs, and its images."""
ASKED: list[Asked] = [
    ("The quick {} brown fox jumps over", IMAGES[:1]),
    ("{}{} One two three", IMAGES[:2]),
    ("def add(a, b):\n    return a + b\n", []),
    ("The quick {} brown fox jumps over", IMAGES[2:]),
    ("One two {} three four five six {} seven", [IMAGES[0], IMAGES[0]]),
]
"""Texts that share beginnings, with images that differ; an image twice."""


def prompts(family: VisionFamily) -> list[dict[str, Any]]:
    mark = processor_of(family.name).mark_text
    return [
        {
            "prompt": text.format(*[mark] * len(images)),
            **({"multi_modal_data": {"image": images}} if images else {}),
        }
        for text, images in ASKED
    ]


def engine(family: VisionFamily, dtype: str, **settings: Any) -> LLM:
    sizes = {"num_kv_blocks": 48, "max_model_len": 480, "limit_mm_per_prompt": {"image": 2}}
    return LLM(str(saved(family.name)), dtype=dtype, device="cpu", **(sizes | settings))


def run(llm: LLM, family: VisionFamily) -> list[Any]:
    """Tokens and log-probabilities of the requests, greedy and random in turn."""
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2), seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1
        )
        for i in range(len(ASKED))
    ]
    return [
        (
            output.outputs[0].token_ids,
            [
                {i: entry.logprob for i, entry in each.items()}
                for each in output.outputs[0].logprobs
            ],
        )
        for output in llm.generate(prompts(family), params, use_tqdm=False)
    ]


def image_token_id(family: VisionFamily) -> int:
    """What stands in a prompt where an embedding of an image does."""
    processed = processor_of(family.name).process(IMAGES[0], {})
    return processed.token_ids[processed.embed_spans[0][0]]


def smallest_step(family: VisionFamily) -> int:
    """Tokens of a step for five requests."""
    return 13 if family.name == "gemma3" else 7  # an image's 9 are not cut


@over_families
def test_greedy_tokens_equal_transformers(family: VisionFamily) -> None:
    """In a batch, in pieces of prompts and images, and with what is cached."""
    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=0,
        stop_token_ids=[image_token_id(family)],  # theirs must not read it
    )
    with engine(family, "float32", max_num_batched_tokens=48, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts(family), params, use_tqdm=False)
        again = llm.generate(prompts(family), params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in again) > 0
    for (_, images), *both in zip(ASKED, outputs, again, strict=True):
        assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids
        for output in both:
            token_ids, num_prompt = output.outputs[0].token_ids, len(output.prompt_token_ids)
            ids = [*output.prompt_token_ids, *token_ids]
            logits = reference_logits(family.name, ids[:-1], images)[num_prompt - 1 :]
            assert token_ids == logits.argmax(-1).tolist()
            wanted = logits.log_softmax(-1)
            for row, token_id, step in zip(
                wanted, token_ids, output.outputs[0].logprobs, strict=True
            ):
                assert abs(step[token_id].logprob - float(row[token_id])) < 2e-4


@pytest.mark.parametrize("family", one_of_each_kind())
def test_the_same_bits_however_requests_are_run(family: VisionFamily) -> None:
    check_bits(family, "bfloat16")


@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl"])
def test_the_same_bits_in_float32(name: str) -> None:
    check_bits(family_of(name), "float32")


def check_bits(family: VisionFamily, dtype: str) -> None:
    """At once, from the cache and in pieces."""
    with engine(family, dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = run(llm, family)
    assert alone[0] != alone[3]  # another image in the same text
    with engine(family, dtype) as llm:
        assert run(llm, family) == alone  # at once
        assert run(llm, family) == alone  # from the cache
    with engine(family, dtype, max_num_batched_tokens=smallest_step(family), max_num_seqs=5) as llm:
        assert run(llm, family) == alone  # in pieces


@pytest.mark.parametrize("family", one_of_each_kind())
def test_the_same_tokens_after_preemption(family: VisionFamily) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(family, "bfloat16") as llm:
        wanted = llm.generate(prompts(family), params, use_tqdm=False)
    longest = max(len(output.prompt_token_ids) for output in wanted) + 40
    blocks = -(-longest // BLOCK_SIZE)
    sizes = {"num_kv_blocks": 1 + blocks, "max_model_len": blocks * BLOCK_SIZE, "max_num_seqs": 4}
    with engine(family, "bfloat16", **sizes) as llm:
        outputs = llm.generate(prompts(family), params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in wanted
    ]


@over_families
def test_a_model_that_takes_no_images_has_no_tower(family: VisionFamily) -> None:
    checkpoint = open_checkpoint(saved(family.name))
    config = replace(model_config(checkpoint.config, "float32"), takes_images=False)
    model = load_model(config, checkpoint)
    assert isinstance(model, torch.nn.Module)
    of_decoder = {name for name in tensor_shapes(checkpoint.config) if not is_of_tower(name)}
    assert {slot.name for slot in weight_slots(model)} == of_decoder
    Refill(model, config, checkpoint.tensor_formats).from_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl"])
def test_text_is_the_same_without_a_tower(name: str) -> None:
    family = family_of(name)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    text, image = prompts(family)[2], prompts(family)[0]
    answers = []
    for limit in (0, 2):
        with engine(family, "bfloat16", limit_mm_per_prompt={"image": limit}) as llm:
            (output,) = llm.generate(text, params, use_tqdm=False)
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
            if not limit:
                with pytest.raises(InvalidRequestError, match="limit_mm_per_prompt"):
                    llm.generate(image, params, use_tqdm=False)
    assert answers[0] == answers[1]


def test_a_model_that_drafts_has_no_tower() -> None:
    family = family_of("llava")
    speculation = {"method": "draft_model", "model": str(saved("llava")), "adaptive": False}
    with engine(family, "bfloat16") as llm:
        wanted = run(llm, family)
    with engine(family, "bfloat16", speculative_config=speculation) as llm:
        assert run(llm, family) == wanted
        target, drafter = llm.llm_engine._client.core._executor._worker.runner.model_and_drafter
        draft, _ = drafter.runner.model_and_drafter
    assert {slot.name for slot in weight_slots(draft)} == {
        slot.name for slot in weight_slots(target) if not is_of_tower(slot.name)
    }


@pytest.mark.parametrize("name", ["qwen2-vl", "smolvlm"])
def test_packed_weights_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    if not native.is_available():
        return  # nothing can be packed
    family = family_of(name)
    source = open_checkpoint(saved(name))
    order = tensor_shapes(source.config)
    manifest = pack_checkpoint(source, tmp_path, "int4", source="model", order=order)
    assert manifest.tensors
    assert not any(is_of_tower(each) for each in manifest.tensors)
    with engine(family, "bfloat16", quantization="int4") as llm:
        wanted = run(llm, family)
    with LLM(str(tmp_path), device="cpu", num_kv_blocks=48, max_model_len=480) as llm:
        assert run(llm, family) == wanted
    inputs = tensors(processor_of(name).process(IMAGES[0], {}))
    with torch.inference_mode():
        plain, packed = (
            load(path, "bfloat16").encode("image", inputs) for path in (saved(name), tmp_path)
        )
    assert torch.equal(plain, packed)
