"""An adapter's directory without a model, and the names that requests know it by."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tokenmill.contracts.request import AdapterInfo
from tokenmill.engine.adapters import AdapterRegistry
from tokenmill.errors import AdapterError, ModelNotFoundError
from tokenmill.features.lora.peft import (
    CONFIG,
    WEIGHTS,
    read_settings,
    signature,
    weights_file,
)
from tokenmill.lora_request import LoRARequest


def directory(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", **config}))
    (path / WEIGHTS).write_bytes(b"x")
    return path


def test_scales_and_ranks_by_module(tmp_path: Path) -> None:
    settings = read_settings(
        directory(
            tmp_path,
            r=16,
            lora_alpha=8,
            rank_pattern={"q_proj": 4, r"layers\.1\.mlp\..*": 2},
            alpha_pattern={"layers.0.self_attn.v_proj": 32.5},
        )
    )
    assert settings.rank_of("model.layers.3.self_attn.q_proj") == 4
    assert settings.rank_of("q_proj") == 4
    assert (
        settings.rank_of("model.layers.3.self_attn.fq_proj") == 16
    )  # a name's end is a whole part
    assert settings.rank_of("model.layers.1.mlp.up_proj") == 2
    assert settings.rank_of("model.layers.11.mlp.up_proj") == 16
    assert settings.scale_of("model.layers.3.self_attn.q_proj") == 2.0
    assert settings.scale_of("model.layers.0.self_attn.v_proj") == 32.5 / 16
    assert settings.largest_rank == 16
    rooted = read_settings(directory(tmp_path, r=16, lora_alpha=8, use_rslora=True))
    assert rooted.scale_of("any") == 8 / math.sqrt(16)


def test_settings_count_by_what_they_say(tmp_path: Path) -> None:
    def canonical(**config: Any) -> bytes:
        return read_settings(directory(tmp_path, **config)).canonical()

    plain = canonical(r=8, lora_alpha=16, rank_pattern={"a": 1, "b": 2})
    assert plain == canonical(
        lora_alpha=16.0, rank_pattern={"b": 2, "a": 1}, r=8, target_modules=["q"], task_type="X"
    )
    for other in (
        {"r": 4, "lora_alpha": 16, "rank_pattern": {"a": 1, "b": 2}},
        {"r": 8, "lora_alpha": 8, "rank_pattern": {"a": 1, "b": 2}},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"a": 1}},
        {"r": 8, "lora_alpha": 16, "alpha_pattern": {"a": 1, "b": 2}},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"a": 1, "b": 2}, "use_rslora": True},
    ):
        assert canonical(**other) != plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"r": 1.5}, "r=1.5"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": []}, ""),
        ({"rank_pattern": ["a"]}, "rank_pattern"),
        ({"rank_pattern": {"a": -1}}, "rank_pattern"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern"),
        ({"alpha_pattern": {"a": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"((a+)+)+b+": 1}}, "repeats more than 3 times"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "trained biases"),
        ({"use_dora": True}, "DoRA"),
        ({"layer_replication": [[0, 1]]}, "repeated"),
        ({"target_parameters": ["experts.w"]}, "experts"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"init_lora_weights": "OLoRA"}, "not the model's own"),
        ({"init_lora_weights": "gaussian", "modules_to_save": None, "bias": "none"}, ""),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    """An empty message: it is taken."""
    path = directory(tmp_path, **config)
    if not message:
        read_settings(path)
        return
    with pytest.raises(AdapterError, match=message):
        read_settings(path)


def test_files(tmp_path: Path) -> None:
    path = directory(tmp_path / "a")
    assert weights_file(path) == path / WEIGHTS
    first = signature(path)
    assert signature(path) == first
    (path / WEIGHTS).write_bytes(b"yy")
    assert signature(path) != first
    os.replace(path / WEIGHTS, path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="run code"):
        weights_file(path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="holds no"):
        weights_file(path)
    with pytest.raises(AdapterError, match="no adapter that can be read"):
        signature(path)
    for text in ("", "{", "[]", "3", '"\ud800"', "[" * 100_000):
        (path / CONFIG).write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(AdapterError):
            read_settings(path)
    (path / CONFIG).write_bytes(b" " * (2 << 20))
    with pytest.raises(AdapterError, match="larger than"):
        read_settings(path)
    (path / CONFIG).unlink()
    with pytest.raises(AdapterError, match="holds no adapter_config"):
        read_settings(path)
    with pytest.raises(AdapterError, match="no directory"):
        read_settings(path / "nowhere")


def test_names(tmp_path: Path) -> None:
    path = directory(tmp_path / "a")
    registry = AdapterRegistry(is_enabled=True)
    request = LoRARequest("one", str(path))
    loading = registry.begin(request)
    assert loading.known is None
    assert "one" not in registry
    ref = registry.finish(loading, AdapterInfo("digest", 8, 14))
    assert (ref.name, ref.load_id, ref.path) == ("one", "digest", str(path))
    assert registry.begin(request).known == ref
    assert registry.begin(LoRARequest("two", str(path))).known is None  # another name is asked for
    (path / WEIGHTS).write_bytes(b"other")
    again = registry.begin(request)
    assert again.known is None
    assert registry.finish(again, AdapterInfo("other", 8, 14)).load_id == "other"
    assert list(registry) == ["one"]
    with pytest.raises(ModelNotFoundError, match="Did you mean 'one'"):
        registry.get("on")
    assert registry.remove("one").info.rank == 8
    with pytest.raises(ModelNotFoundError):
        registry.remove("one")
    with pytest.raises(AdapterError, match="enable_lora=True"):
        AdapterRegistry(is_enabled=False).begin(request)
