"""Adapters with random weights of large effect, and transformers' models with them merged in."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def linear_modules(model: Any, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the model's linear layers whose names end so."""
    found = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in names or "experts" in name.split("."):
            continue
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    assert found, names
    return found


def matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((v for k, v in pattern.items() if re.search(rf"(^|\.)({k})$", module)), default)


def write_adapter(
    path: Path,
    model: Any,
    *,
    targets: Sequence[str] = ATTENTION + MLP,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    strength: float = 1.0,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    prefix: str = "base_model.model.",
    **config: Any,
) -> Path:
    """A directory in PEFT's format for these modules of transformers' `model`."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for name, (width, depth) in linear_modules(model, targets).items():
        each = matching(rank_pattern or {}, name, rank)
        a = torch.randn(each, depth, generator=generator) / depth**0.5
        b = torch.randn(width, each, generator=generator) * strength / alpha
        tensors[f"{prefix}{name}.lora_A.weight"] = a
        tensors[f"{prefix}{name}.lora_B.weight"] = b
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "bias": "none",
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def merged(model: Any, path: Path, prefix: str = "base_model.model.") -> Any:
    """A copy of transformers' model whose weights are W + scale * B A, in float32."""
    from safetensors.torch import load_file

    settings = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
            rank = a.shape[0]
            alpha = matching(settings["alpha_pattern"], module, settings["lora_alpha"])
            root = math.sqrt(rank) if settings.get("use_rslora") else rank
            delta = (b.double() @ a.double()) * alpha / root
            layer = changed.get_submodule(module)
            delta = delta.t() if isinstance(layer, Conv1D) else delta
            layer.weight += delta.to(layer.weight.dtype)
    return changed


@torch.inference_mode()
def logprobs_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Float32 [len(ids), vocab_size], by transformers."""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.float(), -1)
