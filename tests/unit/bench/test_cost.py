"""Bytes and operations of steps, against sums by hand and by loops."""

from __future__ import annotations

import types

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.memory import Weights
from tokenmill.entrypoints.bench.cost import AttentionCost, Cost, RequestWork, model_cost

SHAPES = {
    "model.embed_tokens.weight": (100, 32),
    "model.layers.0.self_attn.q_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.norm.weight": (32,),
}
LAYER_VALUES = 64 * 32 + 32 * 64


def layer(window=None):
    return types.SimpleNamespace(num_heads=4, head_size=16, sliding_window=window)


def cost_of(shapes, format_, *, keeps_blocks=True):
    weights = Weights(shapes, dict.fromkeys(shapes, format_), "bfloat16", keeps_blocks)
    return model_cost(weights, {"a": layer(), "b": layer(8)}, {"a": 100, "b": 200})


def test_a_decode_step_reads_weights_once_and_each_requests_keys():
    cost = cost_of(SHAPES, "BF16")
    step = [RequestWork(1, 50, 1), RequestWork(1, 7, 1)]
    assert not cost.in_blocks
    assert cost.of(step) == Cost(
        num_bytes=2 * (LAYER_VALUES + 100 * 32) + 100 * (50 + 7) + 200 * (8 + 7),
        flops=2 * 2 * (LAYER_VALUES + 100 * 32) + 4 * 4 * 16 * (50 + 7 + 8 + 7),
    )


def test_the_middle_of_a_prompt_needs_no_head():
    cost = cost_of(SHAPES, "BF16")
    without, with_head = cost.of([RequestWork(5, 5, 0)]), cost.of([RequestWork(5, 5, 1)])
    assert with_head.num_bytes - without.num_bytes == 2 * 100 * 32
    assert with_head.flops - without.flops == 2 * 100 * 32


def test_an_embedding_beside_a_head_is_not_read():
    untied = cost_of({**SHAPES, "lm_head.weight": (100, 32)}, "BF16")
    assert untied.of([RequestWork(1, 1, 1)]) == cost_of(SHAPES, "BF16").of([RequestWork(1, 1, 1)])


def test_blocks_count_as_they_are_held():
    packed, expanded = cost_of(SHAPES, "Q4_1"), cost_of(SHAPES, "Q4_1", keeps_blocks=False)
    assert packed.in_blocks
    assert packed.layer_bytes == LAYER_VALUES // 32 * 20
    assert expanded.layer_bytes == 2 * LAYER_VALUES
    assert not expanded.in_blocks


def test_experts_that_nobody_chose_are_not_read():
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    shapes = {**SHAPES, **{name.format(i): (10, 32) for i in range(8)}}
    weights = Weights(shapes, dict.fromkeys(shapes, "BF16"), "bfloat16", keeps_blocks=True)
    cost = model_cost(weights, {}, {}, chosen_share=0.25)
    dense = model_cost(
        Weights(SHAPES, dict.fromkeys(SHAPES, "BF16"), "bfloat16", keeps_blocks=True), {}, {}
    )
    values = 8 * 10 * 32
    for num_tokens, read_share in ((1, 0.25), (2, 0.25 + 0.75 * 0.25), (1000, 1.0)):
        step = [RequestWork(num_tokens, num_tokens, 1)]
        found, expected = cost.of(step), dense.of(step)
        assert found.num_bytes == expected.num_bytes + read_share * 2 * values
        assert found.flops == expected.flops + 2 * 0.25 * values * num_tokens


@given(
    st.integers(1, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80))
)  # tokens, tokens before, window
def test_attention_sees_what_a_loop_over_queries_sees(num_tokens, before, window):
    cost = AttentionCost(num_heads=3, head_size=8, kv_bytes_per_token=10, window=window)
    last = before + num_tokens
    seen = [
        {key for key in range(query + 1) if window is None or key > query - window}
        for query in range(before, last)
    ]
    assert cost.of(RequestWork(num_tokens, last, 0)) == Cost(
        num_bytes=10 * len(set.union(*seen)), flops=4 * 3 * 8 * sum(map(len, seen))
    )
