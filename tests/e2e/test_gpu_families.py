"""Families with kernels of their own on the parts of a GPU: the same bits however requests are run.

That their tokens are right is tested in `tests/models/test_gpu_parts.py`.
"""

from __future__ import annotations

import pytest

from helpers.family_models import prompt, saved
from helpers.gpu_engine import generate, gpu_engine
from tokenmill import SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((7, 1, 4))]
PADDED = GraphSizes(decode=(4,), mixed=(8,), max_num_seqs=4, max_model_len=16)


def outcomes(name, prompts, **settings):
    limits = {"dtype": "float32", "num_kv_blocks": 12, "max_model_len": 16, "max_num_seqs": 4}
    outputs = generate(
        gpu_engine(saved(name), **(limits | settings)), prompts, [PARAMS] * len(prompts)
    )
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt-oss"])
def test_the_same_bits_however_requests_are_run(name):
    """In a batch, in pieces padded as for graphs, and with one step in flight."""
    (alone,) = outcomes(name, PROMPTS[:1])
    together = outcomes(
        name, PROMPTS, sizes=PADDED, max_num_batched_tokens=6, async_scheduling=False
    )
    assert together[0] == alone
