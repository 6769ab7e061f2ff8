"""Settings of draft heads: what follows from a head's files, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tokenmill.config.draft_head import canonical_name
from tokenmill.config.draft_model import DraftFiles
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.resolve import resolve
from tokenmill.errors import ConfigError

GIB = 1 << 30
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
HEAD = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 512}
SHAPES = {"embed": (1000, 64), "layers": (500, 1000)}


def head(
    *,
    is_eagle3: bool = True,
    width: int | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> DraftFiles:
    """Files of a head, with `tensors` of other shapes; a change to None takes the key away."""
    width = width or (192 if is_eagle3 else 128)
    layer = "midlayer." if is_eagle3 else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (64, width),
        f"{layer}self_attn.q_proj.weight": (64, 128 if is_eagle3 else 64),
    }
    if is_eagle3:
        shapes |= {"midlayer.hidden_norm.weight": (64,), "lm_head.weight": (100, 64)}
        shapes |= {"d2t": (100,), "t2d": (1000,)}
    shapes |= tensors or {}
    config = {key: value for key, value in (HEAD | changes).items() if value is not None}
    formats = {name: "I64" if name == "d2t" else "F32" for name in shapes}
    return DraftFiles("head", config, shapes, formats)


def resolved(
    draft: DraftFiles | None = None,
    model: dict[str, Any] = LLAMA,
    method: str = "eagle3",
    implementation: str = "tokenmill",
    **settings: Any,
) -> Any:
    speculation = {"method": method, "model": "h", "num_speculative_tokens": 3}
    gpu = Accelerator("gpu", (9, 0), 80 * GIB, 80 * GIB)
    return resolve(
        EngineArgs(speculative_config=speculation, **({"device": "cpu"} | settings)),
        path="model",
        config=model,
        tensor_shapes=SHAPES,
        tensor_formats=dict.fromkeys(SHAPES, "F32"),
        machine=Machine(
            num_cpus=2, total_memory=24 * GIB, available_memory=4 * GIB, accelerator=gpu
        ),
        implementation=implementation,
        draft=draft or head(),
    )


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_all_layouts_become_one(name: str, here: str) -> None:
    assert canonical_name(name) == here


def test_what_follows_from_its_files() -> None:
    config = resolved()
    speculation = config.speculation
    assert (speculation.method, speculation.num_lookahead_tokens) == ("eagle3", 3)
    draft = speculation.draft
    assert draft.aux_layers == (2, 4, 5)  # near the beginning, the middle and the end of 8
    assert draft.max_model_len == 512
    assert draft.kv_bytes_per_token == 2 * 2 * 16 * 2  # K and V, heads, head size, bf16
    step = config.scheduler.max_num_batched_tokens
    assert config.ledger.draft == draft.num_bytes > step * (3 + 2) * 64 * 2
    assert resolved(head(is_eagle3=False), method="eagle").speculation.draft.aux_layers == ()


def test_a_head_that_does_not_say_has_the_models_context() -> None:
    assert resolved(head(max_position_embeddings=None)).speculation.draft.max_model_len == 2048


def test_layers_that_its_config_names_are_read() -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    assert resolved(head(**{key: [1, 2, 3]})).speculation.draft.aux_layers == (1, 2, 3)
    nested = head(eagle_config={key: [0, 6, 7]})
    assert resolved(nested).speculation.draft.aux_layers == (0, 6, 7)


@pytest.mark.parametrize(
    ("outer", "is_before"), [({}, True), ({"norm_before_residual": False}, False)]
)
def test_a_config_that_nests_its_layer(outer: dict[str, Any], is_before: bool) -> None:
    files = head()
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": HEAD, **outer}
    written = DraftFiles("head", nested, files.tensor_shapes, files.tensor_formats)
    config = resolved(written).speculation.draft.hf_config
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 1)
    assert config["norm_before_residual"] is is_before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (head(is_eagle3=False), r"model='h' is a head for .*method='eagle', not 'eagle3'"),
        (head(width=128), r"fc.weight \(64, 128\), which must be \(64, 192\)"),
        (head(tensors={"fc.weight": (1, 192)}), r"fc.weight \(1, 192\), which must be \(64, 192\)"),
        (head(tensors={"fc.weight": ()}), r"fc.weight \(\), which must be"),
        (head(tensors={"lm_head.weight": (0, 64)}), r"lm_head.weight \(0, 64\).* 1 to 1000"),
        (head(tensors={"lm_head.weight": (1001, 64)}), r"lm_head.weight \(1001, 64\)"),
        (head(tensors={"lm_head.weight": ()}), r"lm_head.weight \(\), which must have a row"),
        (head(num_hidden_layers=2), r"num_hidden_layers=2; heads of one layer are served"),
        (head(num_attention_heads=None), r"model='h': .*num_attention_heads is None"),
        (head(vocab_size=999), r"vocabulary of 999 tokens, but the model has 1000"),
        (
            head(hidden_size=32),
            r"hidden states of 32 values and shares the model's vocabulary, .* 64",
        ),
        (head(norm_output=True), r"norm_output=true, a variant that is not served"),
        (head(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state=false"),
        (head(eagle_aux_hidden_state_layer_ids=[1, 2]), r"layers \[1, 2\]; they must be 3 of"),
        (head(eagle_aux_hidden_state_layer_ids=[1, 2, 8]), r"\[1, 2, 8\]; .* 3 of 0 to 7"),
        (head(eagle_aux_hidden_state_layer_ids=5), r"the layers 5; they must be 3 of 0 to 7"),
        (head(eagle_aux_hidden_state_layer_ids=[1, 2, True]), r"layers \[1, 2, True\]; they must"),
        (
            DraftFiles("whole", LLAMA, SHAPES, dict.fromkeys(SHAPES, "F32")),
            r"is no draft head: .* fc.weight.*method='draft_model'",
        ),
    ],
)
def test_heads_that_cannot_draft_are_refused(files: DraftFiles, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(files)


def test_a_head_is_no_model_that_drafts() -> None:
    with pytest.raises(ConfigError, match=r"is a draft head: set .*method='eagle' or 'eagle3'"):
        resolved(method="draft_model")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, r"method='eagle3' .* enable_lora is on"),
        ({"tensor_parallel_size": 2}, r"method='eagle3' .* tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 2}, r"method='eagle3' .* pipeline_parallel_size=2"),
        ({"device": "cuda"}, r"method='eagle3': heads draft on a CPU only"),
        ({"implementation": "transformers"}, r"LlamaForCausalLM on the code of transformers does"),
        (
            {"model": LLAMA | {"architectures": ["Gemma2ForCausalLM"]}},
            r"Gemma2ForCausalLM does not hand out.*These do: LlamaForCausalLM",
        ),
        (
            {"model": LLAMA | {"architectures": ["LlavaForConditionalGeneration"]}},
            r"LlavaForConditionalGeneration takes images",
        ),
        ({"kv_offload_gb": 1.0, "kv_offload_dir": "/tmp/x"}, r"method='eagle3' needs the draft's"),
    ],
)
def test_what_heads_do_not_go_with_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)
