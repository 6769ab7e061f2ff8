"""Checkpoints in the layouts of GPTQ, AWQ, compressed-tensors and float8, from random codes.

What the formats mean is written down here once more, value by value, from their descriptions: words
are packed by loops, and a weight is (code - zero) * scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tokenmill.checkpoint.hf_directory import HFDirectory

GROUP = 64
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def packed_words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Codes [n, m] to words [n, m * bits / 32], code order[i] of each word at bit i * bits."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.uint64)
    for word in range(words.shape[1]):
        for i in range(per_word):
            column = word * per_word + (order[i] if order else i)
            words[:, word] |= codes[:, column].astype(np.uint64) << np.uint64(i * bits)
    return words.astype(np.uint32).view(np.int32)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


class Quantised:
    """Random codes, zeros and scales of a matrix [n, k], and what they stand for."""

    def __init__(self, n: int, k: int, bits: int, group: int, *, symmetric: bool, seed: int = 0):
        rng = np.random.default_rng([n, k, bits, group, seed])
        self.bits, middle = bits, 1 << (bits - 1)
        self.codes = rng.integers(0, 1 << bits, (n, k))
        self.scales = rng.uniform(0.002, 0.02, (n, k // group)).astype(np.float16)
        self.zeros = rng.integers(1, 1 << bits, (n, k // group))
        if symmetric:
            self.zeros[:] = middle
        self.groups = np.arange(k) // group

    @property
    def values(self) -> torch.Tensor:
        difference = self.codes - self.zeros[:, self.groups]
        return tensor(difference * self.scales[:, self.groups].astype(np.float64)).float()

    def gptq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": tensor(packed_words(self.codes, self.bits).T),
            "qzeros": tensor(packed_words((self.zeros - 1).T, self.bits)),
            "scales": tensor(self.scales.T),
            "g_idx": tensor(self.groups.astype(np.int32)),
        }

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": tensor(packed_words(self.codes.T, 4, AWQ_COLUMNS)),
            "qzeros": tensor(packed_words(self.zeros.T, 4, AWQ_COLUMNS)),
            "scales": tensor(self.scales.T),
        }

    def compressed(self, *, symmetric: bool) -> dict[str, torch.Tensor]:
        parts = {
            "weight_packed": tensor(packed_words(self.codes, self.bits)),
            "weight_scale": tensor(self.scales),
            "weight_shape": torch.tensor(self.codes.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = tensor(packed_words(self.zeros.T, self.bits).T)
        return parts


def gptq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, **more}


def compressed_config(**weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, **weights}
    group = {"targets": ["Linear"], "weights": settings}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a whole model can be quantised."""

    name: str
    config: dict[str, Any]
    """`quantization_config`."""
    make: Callable[[int, int, int], Parts]
    """The parts of a matrix [n, k] from a seed."""
    block_type: str
    """What it becomes."""


def _codes(n: int, k: int, seed: int, *, bits: int = 4, symmetric: bool = True) -> Quantised:
    return Quantised(n, k, bits, GROUP, symmetric=symmetric, seed=seed)


def _gptq_reordered(n: int, k: int, seed: int) -> Parts:
    """Columns of a group lie apart, differently in every matrix."""
    source = _codes(n, k, seed)
    source.groups = np.random.default_rng(seed).permutation(source.groups)
    return source.gptq()


def _int8(n: int, k: int, seed: int) -> Parts:
    rng = np.random.default_rng(seed)
    scale = tensor(rng.uniform(0.0002, 0.001, (n, 1)).astype(np.float32))
    return {
        "weight": tensor(rng.integers(-128, 128, (n, k)).astype(np.int8)),
        "weight_scale": scale.bfloat16(),
    }


def _float8(n: int, k: int, seed: int, scales: str, shape: tuple[int, int]) -> Parts:
    rng = np.random.default_rng(seed)
    weight = tensor(rng.normal(size=(n, k)).astype(np.float32) * 100).to(torch.float8_e4m3fn)
    scale = tensor(rng.uniform(0.0002, 0.001, shape).astype(np.float32))
    return {"weight": weight, scales: scale}


LAYOUTS = [
    Layout("gptq", gptq_config(), lambda *of: _codes(*of).gptq(), "Q4_0"),
    Layout(
        "gptq with zeros",
        gptq_config(sym=False),
        lambda *of: _codes(*of, symmetric=False).gptq(),
        "Q4_1",
    ),
    Layout("gptq with act-order", gptq_config(desc_act=True), _gptq_reordered, "Q8_0"),
    Layout("gptq of 8 bits", gptq_config(bits=8), lambda *of: _codes(*of, bits=8).gptq(), "Q8_0"),
    Layout(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
        lambda *of: _codes(*of, symmetric=False).awq(),
        "Q4_1",
    ),
    Layout(
        "w4a16",
        compressed_config(),
        lambda *of: _codes(*of).compressed(symmetric=True),
        "Q4_0",
    ),
    Layout(
        "w4a16 with zeros",
        compressed_config(symmetric=False),
        lambda *of: _codes(*of, symmetric=False).compressed(symmetric=False),
        "Q4_1",
    ),
    Layout("w8a8", compressed_config(num_bits=8, group_size=None), _int8, "Q8_0"),
    Layout(
        "float8 with a scale a row",
        compressed_config(num_bits=8, type="float", group_size=None),
        lambda n, k, seed: _float8(n, k, seed, "weight_scale", (n, 1)),
        "Q8_0",
    ),
    Layout(
        "float8 with a grid of scales",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda n, k, seed: _float8(n, k, seed, "weight_scale_inv", (-(-n // 128), -(-k // 128))),
        "Q8_0",
    ),
]
"""All that docs/formats.md lists."""


def write_quantised(path: Path, plain: Path, layout: Layout) -> Path:
    """The model at `plain` with random codes for the weights of its projections."""
    source, tensors = HFDirectory.open(plain), {}
    for seed, name in enumerate(source.tensor_shapes):
        module, _, part = name.rpartition(".")
        if part == "weight" and module.endswith(("_proj", ".w1", ".w2", ".w3")):
            made = layout.make(*source.tensor_shapes[name], seed)
            tensors.update({f"{module}.{key}": value for key, value in made.items()})
        else:
            tensors[name] = source.tensor(name).contiguous()
    path.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    save_file(tensors, path / "model.safetensors")
    return path
