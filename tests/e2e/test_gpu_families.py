"""Families with kernels of their own on the parts of a GPU: the same bits however requests are run,
and experts in fewer bits.

That their tokens are right is tested in `tests/models/test_gpu_parts.py`.
"""

from __future__ import annotations

import pytest

from helpers.family_models import prompt, saved
from helpers.gpu_engine import generate, gpu_engine
from tokenmill import SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:overflow encountered", "ignore:invalid value encountered", "ignore:All-NaN slice"
    ),
]
"""Padding is computed from whatever memory held before; numpy, which the interpreter computes with,
warns of that.
"""
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((7, 1, 4))]
PADDED = GraphSizes(decode=(4,), mixed=(8,), max_num_seqs=4, max_model_len=16)
LIMITS = {"num_kv_blocks": 12, "max_model_len": 16, "max_num_seqs": 4}


def outcomes(name, prompts, **settings):
    engine = gpu_engine(saved(name), **(LIMITS | settings))
    outputs = generate(engine, prompts, [PARAMS] * len(prompts))
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"dtype": "float32"}),
        ("bamba", {"dtype": "float32"}),
        ("mamba2", {"dtype": "float32"}),
        ("gpt-oss", {"dtype": "float32"}),
        ("gpt-oss", {"quantization": "int4"}),
        ("mixtral", {"quantization": "fp8"}),
    ],
    ids=str,
)
def test_the_same_bits_however_requests_are_run(name, settings):
    """In a batch, in pieces padded as for graphs, and with one step in flight."""
    (alone,) = outcomes(name, PROMPTS[:1], **settings)
    way = {"sizes": PADDED, "max_num_batched_tokens": 6, "async_scheduling": False}
    assert outcomes(name, PROMPTS, **settings, **way)[0] == alone


def scores(name, **settings):
    """Log-probabilities of a prompt's tokens."""
    ids = prompt(14, 5)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = generate(gpu_engine(saved(name), **(LIMITS | settings)), [ids], [params])
    entries = output.prompt_logprobs[1:]
    return [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 0.12), ("int4", 0.45)])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_experts_in_fewer_bits_stay_near_bfloat16(name, quantization, most):
    plain, small = scores(name), scores(name, quantization=quantization)
    off = sum((a - b) ** 2 for a, b in zip(plain, small, strict=True))
    mean = sum(plain) / len(plain)
    assert 0 < off < most**2 * sum((a - mean) ** 2 for a in plain)
