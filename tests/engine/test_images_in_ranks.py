"""Prompts with images in several ranks: the results of one process. The first stage encodes, each
of its ranks for itself; the others know what an image's positions are.

The ranks are threads here (`helpers/rank_threads.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from helpers.rank_threads import llm_in_threads
from helpers.vision_families import VISION_FAMILIES
from helpers.vision_models import picture, processor_of, saved
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.errors import ConfigError
from tokenmill.kernels import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

IMAGES = [picture(64, 48, 1), picture(20, 31, 2)]
ASKED = [
    ("The quick {} brown fox jumps over", IMAGES[:1]),
    ("{}{} One two three", IMAGES),
    ("def add(a, b):\n    return a + b\n", []),
    ("The quick {} brown fox jumps over", IMAGES[:1]),
]
"""Texts with {} where an image belongs; the last is the first again, from the caches."""
OFTEN = ("llava", "qwen2-vl", "qwen3-vl")
"""Plain positions; three for each token; what is added behind the first layers."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 48,
    "max_model_len": 480,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"image": 2},
}


def results(llm: LLM, name: str) -> list[Any]:
    """Tokens and log-probabilities, greedy and random in turn; prompts are in pieces."""
    mark = processor_of(name).mark_text
    prompts = [
        {
            "prompt": text.format(*[mark] * len(images)),
            **({"multi_modal_data": {"image": images}} if images else {}),
        }
        for text, images in ASKED
    ]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=6, ignore_eos=True, logprobs=0)
        for i in range(len(ASKED))
    ]
    return [
        (
            output.outputs[0].token_ids,
            [entry.logprob for step in output.outputs[0].logprobs for entry in step.values()],
        )
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=[] if each.name in OFTEN else [pytest.mark.slow])
        for each in VISION_FAMILIES
    ],
)
def test_ranks_see_what_one_process_sees(name: str) -> None:
    settings = SETTINGS
    if name == "qwen3-vl":  # a stage has all the layers that images speak to
        settings = settings | {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 4}}
    with LLM(str(saved(name)), device="cpu", enforce_eager=True, **settings) as llm:
        expected = results(llm, name)
    with llm_in_threads(saved(name), pipeline_parallel_size=2, **settings) as (llm, ranks):
        assert results(llm, name) == expected
        towers = [tower_bytes(ranks.workers[rank].runner._model._part) for rank in range(2)]
    assert towers[0] > 0
    assert towers[1] == 0
    with llm_in_threads(saved(name), tensor_parallel_size=2, **settings) as (llm, _):
        found = results(llm, name)
        assert results(llm, name) == found
    for (ours, our_logprobs), (theirs, their_logprobs) in zip(found, expected, strict=True):
        assert ours == theirs
        assert our_logprobs == pytest.approx(their_logprobs, abs=5e-4)


def test_levels_of_a_tower_must_fit_the_first_stage() -> None:
    with (
        pytest.raises(ConfigError, match="more than the 1 of the decoder, or of its first stage"),
        llm_in_threads(saved("qwen3-vl"), pipeline_parallel_size=2, **SETTINGS),
    ):
        pass


def tower_bytes(model: nn.Module) -> int:
    """What a stage's model has in memory of a tower."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if is_of_tower(name) and parameter.device.type != "meta"
    )
