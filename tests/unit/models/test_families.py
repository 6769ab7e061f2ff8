"""What configs of families say: windows, RoPE, experts, names; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helpers.models import PagedRun, model_from_tensors
from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor
from tokenmill.config.memory import kv_bytes_per_token
from tokenmill.config.parameters import read_parameters
from tokenmill.config.windows import has_rope
from tokenmill.contracts.kv_cache import KVCacheSpec
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
from tokenmill.kernels.experts import Routing, mix_experts_reference, route_reference
from tokenmill.kernels.gemm import PackedBlocks
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.decoder import LayerParts
from tokenmill.models.deepseek import OrderedLinear, deepseek_routing, row_order, yarn_scale
from tokenmill.models.gemma2 import Gemma2ForCausalLM
from tokenmill.models.gemma3 import Gemma3ForCausalLM
from tokenmill.models.gpt2 import GPT2LMHeadModel as OurGPT2
from tokenmill.models.mixtral import MixtralForCausalLM, expert_counts
from tokenmill.models.qwen2 import qwen_config
from tokenmill.models.smollm3 import SmolLM3ForCausalLM
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.packed_blocks import QUANTIZED_TYPES

SIZES: dict[str, Any] = {
    "architectures": ["AnyForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def gemma3_config(**changes: Any) -> Any:
    return Gemma3ForCausalLM.read_config(SIZES | {"sliding_window": 9} | changes)


def test_windows_of_qwen() -> None:
    windowed = SIZES | {"sliding_window": 7, "max_window_layers": 2}
    assert qwen_config(windowed).windows == (None,) * 4
    assert qwen_config(windowed | {"use_sliding_window": True}).windows == (None, None, 7, 7)
    types = ["sliding_attention", "full_attention"] * 2
    named = windowed | {"use_sliding_window": True, "layer_types": types}
    assert qwen_config(named).windows == (7, None, 7, None)


def test_layers_of_smollm3_without_rope() -> None:
    assert [has_rope({}, layer) for layer in range(8)] == [True, True, True, False] * 2
    assert [has_rope({"no_rope_layers": [0, 1]}, layer) for layer in range(2)] == [False, True]


def test_windows_of_gemma_follow_its_pattern() -> None:
    config = Gemma2ForCausalLM.read_config(SIZES | {"sliding_window": 9})
    assert config.windows == (9, None, 9, None)
    assert gemma3_config().windows == (9,) * 4
    assert gemma3_config(sliding_window_pattern=2).windows == (9, None, 9, None)


def test_rope_of_gemma3_by_kind_of_layer_in_older_and_newer_files() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    older = gemma3_config(
        layer_types=types,
        rope_theta=5000.0,
        rope_local_base_freq=70.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    newer = gemma3_config(
        layer_types=types,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        },
    )
    for config in (older, newer):
        assert [rope.theta for rope in config.ropes] == [70.0, 5000.0] * 2
        assert [rope.rope_type for rope in config.ropes] == ["default", "linear"] * 2
    assert gemma3_config().ropes[0].theta == 10_000.0


def test_the_context_of_gemma3_includes_its_scaling() -> None:
    scaled = SIZES | {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert read_parameters(scaled).max_context == 64


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (Gemma2ForCausalLM, {"use_bidirectional_attention": True}, "tokens that are not written"),
        (Gemma2ForCausalLM, {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        (Gemma2ForCausalLM, {"layer_types": ["full_attention"]}, "at least 4 of full_attention"),
        (Gemma2ForCausalLM, {"layer_types": ["linear"] * 4}, "layer_types is .*linear"),
        (Gemma3ForCausalLM, {"rope_parameters": {"rope_theta": 1.0}}, "no settings for 'full"),
        (MixtralForCausalLM, {}, "num_experts"),
        (MixtralForCausalLM, {"num_local_experts": 2, "num_experts_per_tok": 3}, "is more than"),
        (SmolLM3ForCausalLM, {"no_rope_layers": [1, 0]}, "one for each layer"),
        (OurGPT2, {"num_attention_heads": 5, "head_dim": None}, "not a multiple of"),
        (OurGPT2, {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_cannot_be_served_is_refused(family, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        family(SIZES | changes, dtype=torch.float32, max_model_len=16)


def test_gpt2_under_the_names_of_its_first_checkpoint() -> None:
    """Without a prefix, and with masks that follow from the config."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    theirs = GPT2LMHeadModel(config).eval()
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    hf_config = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 31,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    }
    model = model_from_tensors(hf_config, tensors, max_model_len=64)
    ids = torch.randint(31, (20,)).tolist()
    found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_experts_get_their_rows_and_no_others() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 0]])
    seen = {}

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        seen[expert] = rows[:, 0].tolist()
        return rows * 10**expert

    x = torch.tensor([[1.0], [2.0], [3.0]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.0, 1.0]])
    found = mix_experts_reference(x, weights, chosen, run, 5)
    assert seen == {0: [1.0, 2.0, 3.0], 2: [1.0, 3.0], 3: [2.0]}
    assert found.flatten().tolist() == [50.25, 4002.0, 3.0]


@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_of_experts(renormalize: bool) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1000.0]])
    weights, chosen = route_reference(logits, Routing(2, renormalize=renormalize))
    assert chosen.tolist() == [[1, 2]]
    expected = logits.softmax(-1)[:, [1, 2]]
    if renormalize:
        expected = expected / expected.sum()
    torch.testing.assert_close(weights, expected)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Four groups of two; a bias decides who is chosen, and not how much."""
    logits = torch.tensor([[3.0, -9.0, 1.0, 2.0, 0.0, 0.5, -1.0, 1.5]])
    routing = Routing(3, by_logistic=True, num_groups=4, num_best_groups=2, group_best=2)
    bias = torch.zeros(8)
    bias[5] = 2.0
    weights, chosen = route_reference(logits, routing, bias)
    assert chosen.tolist() == [[5, 3, 2]]  # not 0, whose group has but one good one
    torch.testing.assert_close(weights, logits.sigmoid()[:, [5, 3, 2]])


def test_equal_experts_are_chosen_in_their_order() -> None:
    weights, chosen = route_reference(torch.zeros(2, 70), Routing(4, renormalize=True))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"n_group": 3}, "n_routed_experts=8 is not a multiple of n_group=3"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5 of n_group=4"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok=3 cannot be chosen"),
    ],
)
def test_groups_of_experts_that_cannot_be_are_refused(groups: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepseek_routing({"num_experts_per_tok": 3} | groups, 8, by_logistic=True)


def test_counts_of_experts_by_any_name() -> None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        counts = expert_counts({name: 8, "num_experts_per_tok": 2})
        assert counts == {"num_experts": 8, "num_experts_per_tok": 2}


def test_latents_are_what_is_cached() -> None:
    sizes = read_parameters(SIZES | {"kv_lora_rank": 40, "qk_rope_head_dim": 8})
    assert (sizes.num_kv_heads, sizes.head_size, sizes.stores_values) == (1, 48, False)
    assert kv_bytes_per_token(sizes, "bfloat16") == sizes.num_layers * 48 * 2  # once
    spec = KVCacheSpec(1, 48, "bfloat16", stores_values=False)
    assert kv_bytes_per_token(sizes, "bfloat16") == sizes.num_layers * spec.bytes_per_token
    assert row_order(3, 4, in_pairs=True).tolist() == [3, 5, 4, 6, 0, 1, 2]
    assert row_order(3, 4, in_pairs=False).tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert yarn_scale({"rope_type": "default", "mscale_all_dim": 1.0}) == 1.0
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    assert yarn_scale(yarn) == pytest.approx(1.3688879**2)


@pytest.mark.parametrize("format_", ["int8", "int4"])
def test_rows_of_packed_weights_are_put_in_order_too(format_) -> None:
    if not native.is_available():
        return
    order = row_order(40, 24, in_pairs=True)
    parts = LayerParts(0, None, None, torch.bfloat16, PlainKernels())  # type: ignore[arg-type]
    layer = OrderedLinear(64, order, bias=False, parts=parts)
    weight = torch.randn(64, 64)
    packed = PackedBlocks.quantize(QUANTIZED_TYPES[format_], weight)
    raw = RawTensor((64, 64), f"{PACKED_PREFIX}{QUANTIZED_TYPES[format_]}", packed.buffer)
    (slot,) = layer.weight_slots("model.q_proj")
    slot.load(raw)
    assert torch.equal(layer.method.weight, dequantize(raw, torch.bfloat16)[order])
