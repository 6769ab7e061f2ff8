"""Checkpoints of GPTQ, AWQ, compressed-tensors and float8 against their own dequantisation.

What the formats mean is written down once more in `helpers/quantised.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.quantised import (
    GROUP,
    Quantised,
    compressed_config,
    gptq_config,
    packed_words,
    tensor,
)
from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.quantized_directory import QuantizedDirectory
from tokenmill.errors import CheckpointError
from tokenmill.quantization.dequantize import dequantize

N, K = 48, 128


def write(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> QuantizedDirectory:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(
        {f"m.{name}": part for name, part in tensors.items()}, directory / "model.safetensors"
    )
    opened = open_checkpoint(directory)
    assert isinstance(opened, QuantizedDirectory)
    return opened


def read(checkpoint: QuantizedDirectory, format_: str) -> torch.Tensor:
    assert checkpoint.tensor_shapes["m.weight"] == (N, K)
    assert checkpoint.tensor_formats["m.weight"] == format_
    raw = checkpoint.read("m.weight")
    assert raw.data.numel() == checkpoint.num_bytes
    return dequantize(raw, torch.float32)


def assert_rounded_minimum(found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    """Only the minimum, -zero * scale, is rounded: to half precision."""
    assert float((found - expected).abs().max()) <= most * 2.0**-11
    assert not torch.equal(found, expected)


def test_gptq_symmetric_is_exact(tmp_path):
    source = Quantised(N, K, 4, GROUP, symmetric=True)
    assert torch.equal(read(write(tmp_path, gptq_config(), source.gptq()), "Q4_0"), source.values)


def test_gptq_with_zeros_rounds_the_minimum(tmp_path):
    source = Quantised(N, K, 4, GROUP, symmetric=False)
    found = read(write(tmp_path, gptq_config(sym=False), source.gptq()), "Q4_1")
    assert_rounded_minimum(found, source.values, 15 * 0.02)
    again = gptq_config(sym=False, checkpoint_format="gptq_v2")
    source.zeros -= 1  # the second format stores zeros as they are
    assert_rounded_minimum(
        read(
            write(
                tmp_path,
                again,
                {**source.gptq(), "qzeros": tensor(packed_words(source.zeros.T, 4))},
            ),
            "Q4_1",
        ),
        source.values,
        15 * 0.02,
    )


def test_gptq_of_eight_bits_is_exact_where_zeros_are_in_the_middle(tmp_path):
    source = Quantised(N, K, 8, GROUP, symmetric=True)
    found = read(write(tmp_path, gptq_config(bits=8), source.gptq()), "Q8_0")
    assert torch.equal(found, source.values)


def near_in_eight_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within half a step of 8-bit codes, and of the half precision of their scale."""
    largest = expected.view(N, -1, 32).abs().amax(-1, keepdim=True)
    error = (found - expected).view(N, -1, 32).abs()
    return bool((error <= largest * (0.5 / 127 + 2.0**-11)).all())


def test_gptq_that_reorders_columns_takes_eight_bits(tmp_path):
    source = Quantised(N, K, 4, GROUP, symmetric=False)
    source.groups = np.random.default_rng(1).permutation(source.groups)
    found = read(write(tmp_path, gptq_config(sym=False, desc_act=True), source.gptq()), "Q8_0")
    assert near_in_eight_bits(found, source.values)
    with pytest.raises(CheckpointError, match=r"m: .*desc_act"):
        read(write(tmp_path, gptq_config(sym=False), source.gptq()), "Q4_1")


def test_awq(tmp_path):
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    source = Quantised(N, K, 4, GROUP, symmetric=False)
    found = read(write(tmp_path, {**config, "version": "gemm"}, source.awq()), "Q4_1")
    assert_rounded_minimum(found, source.values, 15 * 0.02)
    with pytest.raises(CheckpointError, match="gemv"):
        write(tmp_path, {**config, "version": "gemv"}, source.awq())


@pytest.mark.parametrize("group", [32, 64, K])
def test_compressed_tensors_packed(tmp_path, group):
    source = Quantised(N, K, 4, group, symmetric=True)
    config = compressed_config(group_size=None if group == K else group)
    found = read(write(tmp_path, config, source.compressed(symmetric=True)), "Q4_0")
    assert torch.equal(found, source.values)


def test_compressed_tensors_packed_with_zeros(tmp_path):
    source = Quantised(N, K, 4, GROUP, symmetric=False)
    config = compressed_config(symmetric=False)
    found = read(write(tmp_path, config, source.compressed(symmetric=False)), "Q4_1")
    assert_rounded_minimum(found, source.values, 15 * 0.02)


def test_compressed_tensors_packed_in_groups_of_16_takes_eight_bits(tmp_path):
    source = Quantised(N, K, 4, 16, symmetric=True)
    config = compressed_config(group_size=16)
    found = read(write(tmp_path, config, source.compressed(symmetric=True)), "Q8_0")
    assert near_in_eight_bits(found, source.values)


@pytest.mark.parametrize("shape", [(N, 1), (1,), (N, K // GROUP)])
def test_compressed_tensors_of_int8(tmp_path, shape):
    rng = np.random.default_rng(5)
    codes = rng.integers(-128, 128, (N, K)).astype(np.int8)
    scale = tensor(rng.uniform(0.001, 0.01, shape).astype(np.float32)).bfloat16()
    config = compressed_config(num_bits=8, group_size=None)
    parts = {"weight": tensor(codes), "weight_scale": scale, "input_scale": torch.ones(1)}
    found = read(write(tmp_path, config, parts), "Q8_0")
    by_group = scale.float().reshape(-1, shape[-1] if len(shape) == 2 else 1)
    expected = codes * by_group.repeat_interleave(K // by_group.shape[1], dim=1).numpy()
    assert torch.equal(found, torch.from_numpy(np.asarray(expected, np.float32)))


@pytest.mark.parametrize("scales", ["one", "rows", "grid"])
def test_float8(tmp_path, scales):
    rng = np.random.default_rng(6)
    weight = tensor(rng.normal(size=(N, K)).astype(np.float32) * 100).to(torch.float8_e4m3fn)
    shape = {"one": (1,), "rows": (N, 1), "grid": (2, 2)}[scales]
    scale = tensor(rng.uniform(1e-4, 1e-3, shape).astype(np.float32))
    by_value = scale.reshape(-1, 1)
    name, config = "weight_scale", compressed_config(num_bits=8, type="float", group_size=None)
    if scales == "grid":
        name, config = "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [32, 64]}
        by_value = scale.repeat_interleave(32, 0)[:N].repeat_interleave(64, 1)
    found = read(write(tmp_path, config, {"weight": weight, name: scale}), "Q8_0")
    assert near_in_eight_bits(found, weight.float() * by_value)


def test_what_cannot_be_read_is_refused(tmp_path):
    source = Quantised(N, K, 4, GROUP, symmetric=False)
    for config, words in [
        (gptq_config(bits=3), "3 bits"),
        (gptq_config(dynamic={"a": {}}), "dynamic"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "config_groups|items|int"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            write(tmp_path, config, source.gptq())
    parts = source.gptq()
    for bad in ({**parts, "scales": parts["scales"][:, :7].clone()}, {"qweight": parts["qweight"]}):
        with pytest.raises(CheckpointError, match=r"m: its tensors do not fit.*qweight \(16, 48\)"):
            read(write(tmp_path, gptq_config(sym=False), bad), "Q4_1")
    with pytest.raises(CheckpointError, match="zeros other than 8"):
        read(write(tmp_path, gptq_config(), source.gptq()), "Q4_0")
    with pytest.raises(CheckpointError, match=r"no tensor 'm.weigth'.*m.weight"):
        write(tmp_path, gptq_config(), source.gptq()).read("m.weigth")


def test_a_whole_model_says_what_its_dequantised_one_says(tmp_path):
    """Every linear layer in AWQ's layout, beside the same model with the values in bfloat16."""
    plain = HFDirectory.open(write_wide_llama(tmp_path / "plain"))
    config = json.loads((plain.path / "config.json").read_text())
    packed, values = {}, {}
    for name in plain.tensor_shapes:
        weight = plain.tensor(name)
        packed[name] = values[name] = weight
        if name.endswith("_proj.weight"):
            source = Quantised(*weight.shape, 4, GROUP, symmetric=False, seed=len(packed))
            source.scales = (source.scales * 2).astype(np.float16)
            del packed[name]
            module = name.removesuffix("weight")
            packed.update({f"{module}{part}": x for part, x in source.awq().items()})
            values[name] = source.values
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    logprobs = []
    for label, tensors, more in [
        ("awq", packed, {"quantization_config": settings}),
        ("values", values, {}),
    ]:
        directory = tmp_path / label
        directory.mkdir()
        for file in plain.path.iterdir():
            if file.suffix != ".safetensors":
                (directory / file.name).write_bytes(file.read_bytes())
        (directory / "config.json").write_text(json.dumps({**config, **more}))
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        ids = [(i * 37) % 390 + 3 for i in range(60)]
        with LLM(str(directory), device="cpu", num_kv_blocks=16) as llm:
            (output,) = llm.generate([ids], params, use_tqdm=False)
        places = zip(ids, output.prompt_logprobs or [], strict=True)
        logprobs.append(torch.tensor([place[t].logprob for t, place in places if place]))
    error = (logprobs[0] - logprobs[1]).square().mean().sqrt() / logprobs[1].std()
    assert float(error) < 0.2
