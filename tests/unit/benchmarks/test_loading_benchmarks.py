"""The benchmarks of loading and of a billion parameters, as far as they go on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokenmill.checkpoint.hf_directory import HFDirectory

FOLDER = Path(__file__).parents[3] / "benchmarks"
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    import one_billion_shape

    monkeypatch.setattr(one_billion_shape, "CONFIG", one_billion_shape.CONFIG | SMALL)
    monkeypatch.setattr(one_billion_shape, "SHARD_BYTES", 200_000)
    one_billion_shape.write_checkpoint(tmp_path)
    return tmp_path


def test_the_checkpoint_is_sharded_random_and_whole(directory):
    checkpoint = HFDirectory.open(directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    up = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert up.shape == (256, 128)
    assert 0.01 < float(up.float().std()) < 0.03
    assert not torch.equal(up, checkpoint.tensor("model.layers.1.mlp.up_proj.weight"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint.num_bytes


@pytest.mark.parametrize("format_", ["bf16", "int8", "int4"])
def test_a_load_is_measured(directory, format_):
    import loading

    found = loading.load(directory, format_, cold=True)
    assert found["seconds"] > 0
    assert found["file"] == HFDirectory.open(directory).num_bytes
    bits = {"bf16": 16, "int8": 8.5, "int4": 5}[format_]
    assert found["weights"] <= found["file"] * max(bits, 8.5) / 16 * 1.01
    assert found["peak"] >= found["grown"]
    assert loading.read_all(directory, 2) > 0
    assert loading.read_all(directory, 2, keep=True) > 0


def test_the_table_of_loading_shows_ratios(capsys):
    import loading

    row = {
        "format": "bf16",
        "cache": "cold",
        "read_seconds": 2.0,
        "keep_seconds": 2.5,
        "load_seconds": 3.0,
        "load_bytes_per_second": 8e8,
        "time_ratio": 1.5,
        "packed_bytes": 2.4e9,
        "peak_bytes": 2.6e9,
        "memory_ratio": 1.08,
    }
    loading.show([row])
    assert "1.50" in capsys.readouterr().out


def test_limits_follow_from_bytes_and_operations():
    from one_billion import Limits
    from one_billion_shape import CONFIG

    limits = Limits(weight_bytes=2_471_628_800, bytes_per_second=25e9, flops=1e12)
    assert limits.of("one") == pytest.approx(25e9 / 2_471_628_800, rel=1e-2)
    assert 15 < limits.of("sixteen") / limits.of("one") < 16
    layers = 1_235_814_400 - CONFIG["vocab_size"] * 2048 - 33 * 2048
    assert limits.of("prompt") == pytest.approx(1e12 / (2 * layers), rel=0.05)


def test_figures_stand_beside_their_limit_and_vllm():
    from one_billion import VLLM, Limits, rows

    figures = {"one": {"decode": 5.0}, "sixteen": {"decode": 60.0}, "prompt": {"prompts": 200.0}}
    slower = {"one": {"decode": 2.0}, "sixteen": {"decode": 30.0}, "prompt": {"prompts": 100.0}}
    limits = Limits(10**9, 1e10, 1e12)
    made = rows({"tokenmill bf16": figures, VLLM: slower}, {"tokenmill bf16": limits, VLLM: limits})
    assert [row["of_vllm"] for row in made] == [2.5, 2.0, 2.0, 1.0, 1.0, 1.0]
    assert all(row["of_limit"] == row["tokens_per_second"] / row["limit"] for row in made)
