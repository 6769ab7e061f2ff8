"""Settings of several processes: what is refused and why, and what the largest rank has."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import Machine
from tokenmill.config.parallel import ParallelConfig, stage_layers
from tokenmill.config.resolve import resolve
from tokenmill.errors import ConfigError

MACHINE = Machine(num_cpus=8, total_memory=16 << 30, available_memory=8 << 30, isa="avx512")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
SHAPES = {
    "model.embed_tokens.weight": (1000, 256),
    "lm_head.weight": (1000, 256),
    "model.norm.weight": (256,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(6)
        for name, shape in {
            "self_attn.q_proj": (256, 256),
            "self_attn.k_proj": (128, 256),
            "self_attn.v_proj": (128, 256),
            "self_attn.o_proj": (256, 256),
            "mlp.gate_proj": (512, 256),
            "mlp.up_proj": (512, 256),
            "mlp.down_proj": (256, 512),
            "input_layernorm": (256,),
        }.items()
    },
}


def settled(
    config: dict[str, Any] | None = None,
    machine: Machine = MACHINE,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    **settings: Any,
) -> EngineConfig:
    return resolve(
        EngineArgs(model="m", device="cpu", **settings),
        path="m",
        config=CONFIG | (config or {}),
        tensor_shapes=shapes,
        tensor_formats=dict.fromkeys(shapes, "BF16"),
        machine=machine,
    )


RAY: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be an integer of at least 1"),
    (
        {},
        {"tensor_parallel_size": 3},
        "tensor_parallel_size=3 must divide the model's num_attention_heads=8; those that"
        " divide all of its sizes: 1, 2, 4, 8",
    ),
    (
        {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 516},
        {"tensor_parallel_size": 6},
        "must divide the model's num_key_value_heads=4, or be a multiple of it",
    ),
    (
        {"intermediate_size": 511},
        {"tensor_parallel_size": 2},
        "must divide the model's intermediate_size=511",
    ),
    (
        {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 33, "num_experts": 4},
        {"tensor_parallel_size": 2},
        "moe_intermediate_size=33",
    ),
    (
        {},
        {"pipeline_parallel_size": 7},
        "pipeline_parallel_size=7 is more than the model's 6 layers",
    ),
    (
        {"architectures": ["GPT2LMHeadModel"]},
        {"pipeline_parallel_size": 2},
        "pipeline_parallel_size=2: GPT2LMHeadModel cannot be divided: its queries",
    ),
    (
        {"architectures": ["BertModel"]},
        {"tensor_parallel_size": 2},
        "BertModel cannot be divided: it is not among the families that are",
    ),
    (
        {"architectures": ["SomethingForCausalLM"]},
        {"tensor_parallel_size": 2},
        "SomethingForCausalLM cannot be divided: it is not among the families that are",
    ),
    (
        {"intermediate_size": 544},
        {"tensor_parallel_size": 2, "quantization": "int8"},
        "quantization='int8' has a scale for 32 values, but with tensor_parallel_size=2 a rank has"
        " 272 values of intermediate_size",
    ),
    (
        {},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
        "'uni' is one process, but tensor_parallel_size=2 and pipeline_parallel_size=1 need 2",
    ),
    (
        {},
        {"distributed_executor_backend": "ray"},
        "'ray' places several processes, but tensor_parallel_size=1 and pipeline_parallel_size=1",
    ),
    (
        {},
        {**RAY, "nnodes": 2, "node_rank": 1},
        "'ray' starts the ranks of all machines, but node_rank=1",
    ),
    ({}, {**RAY, "data_parallel_size": 2}, "'ray' with data_parallel_size=2 is not supported"),
    ({}, {"distributed_executor_backend": "mpi"}, "is not one of: uni, mp, ray"),
    (
        {},
        {"tensor_parallel_size": 2, "nnodes": 4},
        "nnodes=4 machines cannot have equal parts of the 2 ranks",
    ),
    ({}, {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "serve --headless"),
    ({}, {"master_port": 70_000}, "master_port=70000 must be at most 65535"),
    (
        {},
        {"tensor_parallel_size": 2, "nnodes": 2, "data_parallel_size": 2},
        "data_parallel_size=2 with nnodes=2 is not supported",
    ),
    (
        {},
        {"pipeline_parallel_size": 2, "speculative_config": {"model": "draft"}},
        "pipeline_parallel_size=2 with a model that drafts is not supported",
    ),
    (
        {},
        {"tensor_parallel_size": 2, "kv_offload_dir": "/tmp/kv"},
        "with KV offload or KV transfer is not supported",
    ),
    (
        {},
        {"pipeline_parallel_size": 2, "kv_transfer_config": {"kv_connector": "TCPConnector"}},
        "with KV offload or KV transfer is not supported",
    ),
]


@pytest.mark.parametrize(("config", "settings", "message"), REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(
    config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(config, **settings)
    assert message in str(caught.value)


def test_an_unlike_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs on the code of transformers"):
        resolve(
            EngineArgs(model="m", device="cpu", tensor_parallel_size=2),
            path="m",
            config=CONFIG,
            tensor_shapes=SHAPES,
            tensor_formats=dict.fromkeys(SHAPES, "BF16"),
            machine=MACHINE,
            implementation="transformers",
        )


def test_threads_and_memory_are_divided_among_the_ranks_of_a_machine() -> None:
    one, four = settled(), settled(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert (one.num_threads, four.num_threads) == (8, 2)
    assert four.ledger.available == one.ledger.available // 4
    on_two = settled(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    assert (on_two.num_threads, on_two.ledger.available) == (4, one.ledger.available // 2)


def test_more_ranks_than_processors_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = settled(machine=replace(MACHINE, num_cpus=1), tensor_parallel_size=2)
    assert config.num_threads == 1
    assert "2 ranks on this machine, but it has 1 processors" in caplog.text


def test_a_pipeline_has_as_many_steps_in_flight_as_stages() -> None:
    assert settled().scheduler.max_steps_in_flight == 1
    scheduler = settled(pipeline_parallel_size=3).scheduler
    assert (scheduler.max_steps_in_flight, scheduler.num_stages) == (3, 3)


def test_the_ledger_counts_what_a_rank_has() -> None:
    whole = settled().ledger.weights
    # A norm is whole on every rank of a stage.
    assert settled(tensor_parallel_size=2).ledger.weights == pytest.approx(whole / 2, rel=0.01)
    # The embedding, or the head, is beside a half of the layers.
    vocabularies = 2 * 2 * 1000 * 256
    staged = settled(pipeline_parallel_size=2).ledger.weights
    assert staged == pytest.approx((whole - vocabularies) / 2 + vocabularies, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"tensor_parallel_size": 2}, 1 / 2),
        ({"tensor_parallel_size": 8}, 1 / 4),  # four heads of keys and values
        ({"pipeline_parallel_size": 3}, 1 / 3),
        ({"pipeline_parallel_size": 4}, 2 / 6),  # the stage with most layers
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1 / 4),
    ],
)
def test_a_token_takes_a_part_of_the_memory_of_each_rank(
    settings: dict[str, Any], share: float
) -> None:
    sizes = {"num_kv_blocks": 100, "max_model_len": 128, "block_size": 32}
    one, several = settled(**sizes).ledger, settled(**sizes, **settings).ledger
    assert several.kv_tokens == one.kv_tokens
    assert several.kv_pool == pytest.approx(one.kv_pool * share, rel=0.01)


def test_places() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, num_nodes=2)
    places = [parallel.place(rank) for rank in range(4)]
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place.local_rank for place in places] == [0, 1, 0, 1]
    assert parallel.output_rank == 2
    assert list(parallel.ranks_of_node(1)) == [2, 3]
    assert parallel.groups_share_memory
    assert not ParallelConfig(tensor_parallel_size=2, num_nodes=2).groups_share_memory
    assert not ParallelConfig().uses_process_group(has_native_kernels=False)
    assert not ParallelConfig(tensor_parallel_size=2).uses_process_group(has_native_kernels=True)
    assert ParallelConfig(tensor_parallel_size=2).uses_process_group(has_native_kernels=False)
    assert [list(stage_layers(5, stage, 2)) for stage in range(2)] == [[0, 1], [2, 3, 4]]


def test_a_tower_is_whole_and_in_the_first_stage() -> None:
    tower = {"vision_tower.layers.3.q_proj.weight": (4096, 4096)}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "decoder_architecture": "LlamaForCausalLM",
        "vision_config": {},
    }

    def weights(shapes: dict[str, tuple[int, ...]], **sizes: int) -> int:
        return settled(config, shapes=shapes, **sizes).ledger.weights

    for sizes in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        more = weights(SHAPES | tower, **sizes) - weights(SHAPES, **sizes)
        assert more == 4096 * 4096 * 2


@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
def test_decoders_that_pool_are_divided(ending: str) -> None:
    config = settled({"architectures": [f"Llama{ending}"]}, tensor_parallel_size=2)
    assert config.model.pooling is not None
    assert config.parallel.world_size == 2
