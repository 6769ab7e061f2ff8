"""Settings of what makes embeddings of images."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EncoderConfig, EngineConfig
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.memory import render
from tokenmill.config.quantization import weights_of
from tokenmill.config.resolve import resolve
from tokenmill.errors import ConfigError

GIB = 1 << 30
SPECULATION = {"method": "ngram", "num_speculative_tokens": 2}
LLAVA, GEMMA3 = "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"
CONFIG = {
    "mm_tokens_per_image": 100,
    "vision_config": {"model_type": "clip_vision_model"},
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
DECODER = {"model.embed_tokens.weight": (1000, 64), "model.layers.0.x.weight": (500, 100_000)}
TOWER = {"vision_tower.layers.0.x.weight": (500, 300_000)}


def resolved(
    shapes: dict[str, tuple[int, ...]] = DECODER, on_gpu: bool = False, **settings: Any
) -> EngineConfig:
    gpu = Accelerator("a GPU", (9, 0), 80 * GIB, 80 * GIB) if on_gpu else None
    text_only = settings.pop("text_only", False)
    architecture = "LlamaForCausalLM" if text_only else settings.pop("architecture", LLAVA)
    config = CONFIG | {"architectures": [architecture]}
    return resolve(
        EngineArgs(**settings),
        path="model",
        config=config,
        tensor_shapes=shapes,
        tensor_formats=dict.fromkeys(shapes, "BF16"),
        machine=Machine(2, 24 * GIB, 8 * GIB, accelerator=gpu),
    )


def test_defaults_follow_the_step_and_the_context() -> None:
    config = resolved(max_num_batched_tokens=96)
    assert config.encoder == EncoderConfig(96, 2048)
    assert config.ledger.encoder_cache == 2048 * 64 * 2
    assert "images" in render(config.ledger)
    assert resolved(on_gpu=True, max_num_batched_tokens=96).encoder == config.encoder
    assert resolved(max_num_batched_tokens=96, max_model_len=64).encoder == EncoderConfig(96, 96)


@pytest.mark.parametrize(("on_gpu", "most"), [(False, 4096), (True, 16_384)])
def test_the_largest_images_are_for_gpus(on_gpu: bool, most: int) -> None:
    config = resolved(
        on_gpu=on_gpu, hf_overrides={"max_position_embeddings": 40_000}, num_kv_blocks=3000
    )
    assert config.model.max_model_len > most
    assert config.encoder is not None
    assert config.encoder.encoder_cache_size == most


def test_what_was_set_holds() -> None:
    config = resolved(max_num_encoder_input_tokens=7, encoder_cache_size=5000)
    assert config.encoder == EncoderConfig(7, 5000)


@pytest.mark.parametrize(
    "settings",
    [{"text_only": True}, {"limit_mm_per_prompt": {"image": 0}}],
    ids=lambda settings: next(iter(settings)),
)
def test_where_no_images_come_nothing_is_kept_for_them(settings: dict[str, Any]) -> None:
    config = resolved(**settings)
    assert config.encoder is None
    assert config.ledger.encoder_cache == 0


def test_where_no_images_come_a_tower_takes_no_memory() -> None:
    beside, alone = DECODER | TOWER, DECODER
    off = resolved(beside, limit_mm_per_prompt={"image": 0})
    assert off.ledger.weights == resolved(alone).ledger.weights < resolved(beside).ledger.weights
    formats = dict.fromkeys(beside, "BF16")
    assert weights_of(off, beside, formats).num_bytes == off.ledger.weights


@pytest.mark.parametrize("name", ["max_num_encoder_input_tokens", "encoder_cache_size"])
def test_impossible_sizes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        resolved(**{name: 0})


def test_a_tower_makes_steps_no_smaller() -> None:
    alone, beside = (resolved(shapes) for shapes in (DECODER, DECODER | TOWER))
    assert alone.ledger.weights < beside.ledger.weights
    assert alone.scheduler == beside.scheduler


@pytest.mark.parametrize(
    ("settings", "budget", "num_seqs"),
    [
        ({}, 100 + 127, 128),
        ({"max_num_seqs": 4}, 103, 4),
        ({"max_num_batched_tokens": 130}, 130, 31),
        ({"max_num_batched_tokens": 100}, 100, 1),
        ({"max_num_seqs": 4, "speculative_config": SPECULATION}, 100 + 3 * 3, 4),
        ({"max_num_batched_tokens": 130, "speculative_config": SPECULATION}, 130, 11),
        ({"max_num_batched_tokens": 30, "limit_mm_per_prompt": {"image": 0}}, 30, 30),
    ],
    ids=str,
)
def test_a_step_has_room_for_an_image_that_is_not_cut(
    settings: dict[str, Any], budget: int, num_seqs: int
) -> None:
    """Beside the tokens of all other requests."""
    slow = DECODER | {"model.layers.1.x.weight": (20_000, 100_000)}  # short steps
    config = resolved(slow, architecture=GEMMA3, **settings)
    assert config.scheduler.max_num_batched_tokens == budget
    assert config.scheduler.max_num_seqs == num_seqs
    assert config.encoder is None or config.encoder.is_bidirectional


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"max_num_batched_tokens": 99}, 100),
        ({"max_num_batched_tokens": 120, "max_num_seqs": 22}, 121),
    ],
    ids=str,
)
def test_a_step_that_is_too_short_for_an_image_is_refused(
    settings: dict[str, Any], needed: int
) -> None:
    with pytest.raises(ConfigError, match=f"is less than {needed}: the 100 tokens of an image"):
        resolved(architecture=GEMMA3, **settings)
    assert resolved(**settings).encoder is not None
