"""Which steps a GPU's runner computes before the first request."""

from __future__ import annotations

import pytest

from tokenmill.kernels.gpu.moe import choose_moe_tile
from tokenmill.worker.batch import BatchShape
from tokenmill.worker.graphs.cuda import GraphSizes
from tokenmill.worker.limits import RunnerLimits

LIMITS = RunnerLimits(
    max_num_seqs=48, max_num_batched_tokens=8192, max_model_len=4096, block_size=16, vocab_size=97
)


def test_numbers_of_requests_and_long_steps() -> None:
    decoding = [BatchShape(num, num, 1, 1) for num in (1, 2, 4, 8, 16, 32, 48)]
    long = [BatchShape(num, 1, num, 1) for num in (1024, 2048, 4096)]
    assert LIMITS.steps_of_variants == decoding + long


@pytest.mark.parametrize(("num_experts", "k"), [(32, 4), (128, 4), (128, 8), (256, 8)])
def test_no_request_waits_for_a_tile_of_experts_to_be_compiled(num_experts: int, k: int) -> None:
    def tile(num_tokens: int) -> object:
        return choose_moe_tile(num_tokens * k, num_experts)

    sizes = GraphSizes.default(
        LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len
    )
    steps = [*sizes.all_shapes(), *LIMITS.steps_of_variants, LIMITS.largest_step]
    compiled = {tile(step.num_tokens) for step in steps}
    assert {tile(tokens) for tokens in range(1, LIMITS.max_num_batched_tokens + 1)} <= compiled
