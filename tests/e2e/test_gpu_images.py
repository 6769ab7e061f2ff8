"""Images on the parts of a GPU: the tokens are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.gpu_engine import gpu_engine
from helpers.vision_models import mark_of, picture, saved
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)


def prompts(name: str) -> list[Any]:
    mark = mark_of(name)
    return [
        {"prompt": f"Look{mark}", "multi_modal_data": {"image": picture(64, 48)}},
        {"prompt": "no image"},
        {"prompt": f"Look{mark}", "multi_modal_data": {"image": picture(64, 48, seed=5)}},
    ]


def generate(name: str, given: list[Any], **settings: Any) -> list[RequestOutput]:
    limits = {"dtype": "float32", "num_kv_blocks": 24, "max_model_len": 64, "max_num_seqs": 4}
    engine = gpu_engine(saved(name), with_tokenizer=True, **limits, **settings)
    for number, prompt in enumerate(given):
        engine.add_request(str(number), prompt, PARAMS)
    ended = {}
    while engine.has_unfinished_requests():
        ended.update({output.request_id: output for output in engine.step()})
    return [ended[str(number)] for number in range(len(given))]


def logprobs(outputs: list[RequestOutput]) -> list[list[float]]:
    """Of the tokens that were drawn."""
    return [
        [entry.logprob for step in output.outputs[0].logprobs or [] for entry in step.values()]
        for output in outputs
    ]


@pytest.mark.parametrize(
    "name",
    ["qwen2-vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("smolvlm", "gemma3"))],
)
def test_tokens_are_those_of_the_cpu(name: str) -> None:
    """In chunks, padded as for graphs. Bits are not compared: the interpreter's products of tiles
    of several sizes round in several ways, as those of a GPU do not.
    """
    with LLM(str(saved(name)), device="cpu", dtype="float32", max_model_len=64) as llm:
        wanted = llm.generate(prompts(name), PARAMS)
    assert logprobs(wanted)[0] != logprobs(wanted)[2]
    sizes = GraphSizes(decode=(4,), mixed=(16,), max_num_seqs=4, max_model_len=64)
    found = generate(name, prompts(name), sizes=sizes, max_num_batched_tokens=16)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    for of_ours, of_theirs in zip(logprobs(found), logprobs(wanted), strict=True):
        assert of_ours == pytest.approx(of_theirs, abs=1e-3)
