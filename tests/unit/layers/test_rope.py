"""RoPE tables equal transformers' for every type (B109)."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tokenmill.config.resolve import apply_overrides
from tokenmill.errors import ConfigError
from tokenmill.kernels.rotary import apply_rotary
from tokenmill.layers.rope import RopeConfig, RotaryEmbedding

HEAD_SIZE = 32
LENGTH = 1024
BASE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "rope_theta": 5000.0,
}
ORIGINAL = {"original_max_position_embeddings": 128}
FACTORS = {
    "short_factor": [1.0 + i / 16 for i in range(HEAD_SIZE // 2)],
    "long_factor": [1.0 + i for i in range(HEAD_SIZE // 2)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 8.0, **ORIGINAL},
    "yarn betas": {"factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, **ORIGINAL},
    "yarn mscale": {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, **ORIGINAL},
    "yarn attention factor": {"factor": 8.0, "attention_factor": 1.5, **ORIGINAL},
    "longrope": {**FACTORS, **ORIGINAL},
    "longrope factor": {**FACTORS, **ORIGINAL, "factor": 3.0},
}


def rotary(hf_config, max_model_len=LENGTH):
    return RotaryEmbedding(RopeConfig.from_hf(hf_config), HEAD_SIZE, max_model_len)


def transformers_tables(scaling, length):
    """cos and sin [length, HEAD_SIZE / 2] for a text of this length."""
    config = LlamaConfig(**BASE, rope_parameters={"rope_theta": 5000.0, **scaling})
    if scaling["rope_type"] == "default":
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, seq_len=length)
    angles = torch.outer(torch.arange(length).float(), inv_freq)
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("length", [64, LENGTH, 2 * LENGTH])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name, length, key):
    rope_type = name.split()[0]
    ours = rotary(BASE | {"rope_scaling": {key: rope_type, **SCALINGS[name]}}, length)
    cos, sin = transformers_tables({"rope_type": rope_type, **SCALINGS[name]}, length)
    assert ours.cos.dtype == torch.float32
    torch.testing.assert_close(ours.cos, cos, atol=2e-4, rtol=0)
    torch.testing.assert_close(ours.sin, sin, atol=2e-4, rtol=0)


def test_every_place_for_the_settings_reads_the_same():
    scaling = {"rope_type": "llama3", **LLAMA3}
    old = rotary(BASE | {"rope_scaling": scaling})
    new = rotary({**BASE, "rope_theta": None, "rope_parameters": scaling | {"rope_theta": 5000.0}})
    as_text = '{"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,' + (
        ' "original_max_position_embeddings": 128}'
    )
    given = rotary(apply_overrides(BASE, {"rope_scaling": as_text}))
    for other in (new, given):
        assert torch.equal(old.cos, other.cos)
        assert torch.equal(old.sin, other.sin)


def test_frequencies_are_divided_by_the_factors_of_a_gguf_file():
    factors = FACTORS["long_factor"]
    ours = rotary(BASE | {"rope_freq_factors": factors})
    angles = torch.arange(LENGTH)[:, None] / (
        5000.0 ** (torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2)) * torch.tensor(factors)
    )
    torch.testing.assert_close(ours.cos, angles.cos(), atol=2e-4, rtol=0)


def test_a_part_of_the_head_is_rotated():
    ours = rotary(BASE | {"partial_rotary_factor": 0.5})
    assert ours.cos.shape == (LENGTH, HEAD_SIZE // 4)
    query = torch.randn(3, 2, HEAD_SIZE)
    at = ours.at(torch.tensor([5, 6, 7]))
    rotated = apply_rotary(query, at.cos[at.positions], at.sin[at.positions])
    assert torch.equal(rotated[..., HEAD_SIZE // 2 :], query[..., HEAD_SIZE // 2 :])
    torch.testing.assert_close(rotated.norm(dim=-1), query.norm(dim=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "lama3"}}, "'lama3'.*Did you mean 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs the number 'factor'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor.*16"),
        ({"rope_freq_factors": [1.0]}, "rope_freq_factors.*16"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1"),
        ({"partial_rotary_factor": 2}, "from 2 to head_dim"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan"),
        ({"rope_theta": "abc"}, "rope_theta is 'abc'"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*finite"),
        ({"rope_theta": -1}, "cannot be computed.*not finite"),
        ({"rope_freq_factors": ["a"] * 16}, "rope_freq_factors is 'a'"),
        ({"rope_freq_factors": [0] * 16}, "not finite"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type is .*string"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "not finite"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}}, "beta_fast is 'x'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "math domain"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "division by zero"),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    **FACTORS,
                    "original_max_position_embeddings": 1,
                }
            },
            "division by zero",
        ),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 0}}, "not finite"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x'"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        rotary(BASE | change)
