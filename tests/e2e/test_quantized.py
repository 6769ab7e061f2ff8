"""Matrices in eight and four bits: quantised while loading, or packed beforehand and mapped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.checkpoint import PACKED_PREFIX
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.packed_directory import MANIFEST, WEIGHTS
from tokenmill.entrypoints.cli.main import EXIT_FAILURE, EXIT_USAGE, run
from tokenmill.entrypoints.perplexity import perplexity
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.kernels.gemm import PackedBlocks
from tokenmill.layers.packed import NativeKernels
from tokenmill.models.loader import tensor_shapes
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.pack_checkpoint import pack_checkpoint

FORMATS = ["int8", "int4"]
PROMPTS = [[(i * 37 + 11 * j) % 390 + 3 for j in range(3 + 30 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=1)
Results = list[tuple[tuple[int, ...], list[float]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module", params=FORMATS)
def packed(request: pytest.FixtureRequest, model: Path, tmp_path_factory: Any) -> tuple[str, Path]:
    """A format, and the model packed in it."""
    out = tmp_path_factory.mktemp("packed") / request.param
    source = open_checkpoint(model)
    order = tensor_shapes(source.config)
    pack_checkpoint(source, out, request.param, source="wide", order=order)
    return request.param, out


def results(model: Path, batches: list[list[list[int]]], **settings: Any) -> Results:
    with LLM(str(model), device="cpu", num_kv_blocks=64, max_num_seqs=8, **settings) as llm:
        outputs = [
            output.outputs[0]
            for batch in batches
            for output in llm.generate(batch, PARAMS, use_tqdm=False)
        ]
    return [
        (
            tuple(output.token_ids),
            [p[t].logprob for t, p in zip(output.token_ids, output.logprobs or [], strict=True)],
        )
        for output in outputs
    ]


def test_packed_weights_give_the_bits_of_those_quantised_while_loading(packed, model) -> None:
    format_, directory = packed
    together = results(model, [PROMPTS], quantization=format_)
    assert results(directory, [PROMPTS]) == together
    assert results(directory, [[prompt] for prompt in PROMPTS], num_threads=1) == together
    assert results(directory, [PROMPTS], max_num_batched_tokens=16, check_graphs=True) == together


def test_eight_bits_are_near_the_model_and_four_less_so(model) -> None:
    """By the log-probabilities of given tokens, whose choice does not depend on the format."""
    ids = PROMPTS[3]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for format_ in [None, *FORMATS]:
        with LLM(str(model), device="cpu", num_kv_blocks=64, quantization=format_) as llm:
            (output,) = llm.generate([ids], params, use_tqdm=False)
        places = zip(ids, output.prompt_logprobs or [], strict=True)
        found[format_] = torch.tensor([place[token].logprob for token, place in places if place])
    spread = found[None].std()
    eight = (found["int8"] - found[None]).square().mean().sqrt() / spread
    four = (found["int4"] - found[None]).square().mean().sqrt() / spread
    assert 0 < eight < 0.25
    assert 2 * eight < four < 1.2


def test_matrices_that_a_layer_joins_are_one_view_of_the_file(packed) -> None:
    checkpoint = open_checkpoint(packed[1])
    parts = [checkpoint.read(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")]
    n, k = parts[0].shape
    method = NativeKernels().linear_method(2 * n, k, torch.bfloat16)
    for i, part in enumerate(parts):
        method.slot("", slice(i * n, (i + 1) * n)).load(part)
    (span,) = method._spans
    assert span.weight.buffer.data_ptr() == parts[0].data.data_ptr()
    assert span.weight.buffer.numel() == 2 * parts[0].data.numel()
    values = [dequantize(part, torch.float32) for part in parts]
    assert torch.equal(method.gather(torch.arange(2 * n)), torch.cat(values))


def test_which_weights_are_packed(tmp_path) -> None:
    """Vocabularies and routers in eight bits, tables of positions and odd rows not at all."""
    shapes = {
        "model.embed_tokens.weight": (40, 64),
        "model.layers.0.mlp.gate.weight": (8, 64),
        "model.layers.0.mlp.router.weight": (8, 64),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 64),
        "model.layers.0.mlp.up_proj.weight": (96, 64),
        "model.layers.0.mlp.up_proj.bias": (96,),
        "model.layers.0.input_layernorm.weight": (64,),
        "embeddings.position_embeddings.weight": (64, 64),
        "odd.weight": (32, 33),
    }
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    source = open_checkpoint(tmp_path / "in")
    order = ["model.layers.0.mlp.up_proj.weight"]
    pack_checkpoint(source, tmp_path / "out", "int4", source="in", order=order)
    packed = open_checkpoint(tmp_path / "out")
    assert packed.tensor_shapes == shapes
    assert {name: f for name, f in packed.tensor_formats.items() if f != "BF16"} == {
        "model.embed_tokens.weight": "packed Q8_0",
        "model.layers.0.mlp.gate.weight": "packed Q8_0",
        "model.layers.0.mlp.router.weight": "packed Q8_0",
        "model.layers.0.mlp.shared_expert_gate.weight": "packed Q8_0",
        "model.layers.0.mlp.up_proj.weight": "packed Q4_1",
    }
    for name, values in tensors.items():
        found = dequantize(packed.read(name), torch.float32)
        error = (found - values.float()).norm() / values.float().norm()
        assert (
            float(error)
            <= {"BF16": 0, "packed Q8_0": 0.01, "packed Q4_1": 0.1}[packed.tensor_formats[name]]
        )


def test_torch_reads_packed_tensors_to_the_bit(packed) -> None:
    checkpoint = open_checkpoint(packed[1])
    names = [n for n, f in checkpoint.tensor_formats.items() if f.startswith(PACKED_PREFIX)]
    assert len(names) == 16
    for name in names:
        raw = checkpoint.read(name)
        n, k = raw.shape
        blocks = PackedBlocks(raw.data, raw.format.removeprefix(PACKED_PREFIX), n, k)
        assert torch.equal(dequantize(raw, torch.float32), blocks.unpack_rows(torch.arange(n)))


def test_packed_weights_run_among_float32_activations(packed) -> None:
    ((ids, _),) = results(packed[1], [PROMPTS[3:]], dtype="float32")
    assert len(ids) == 10


def broken(packed: tuple[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed[1], tmp_path / "copy"))


def test_another_version_is_refused(packed, tmp_path) -> None:
    copy = broken(packed, tmp_path)
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match=r"version 99.*reads 1.*tokenmill quantize"):
        open_checkpoint(copy)
    (copy / MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match="not a manifest"):
        open_checkpoint(copy)


def test_weights_and_config_that_do_not_belong_together_are_refused(packed, tmp_path) -> None:
    copy = broken(packed, tmp_path)
    weights, config = (copy / WEIGHTS).read_bytes(), (copy / "config.json").read_text()
    (copy / WEIGHTS).write_bytes(weights[:-1])
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(copy)
    (copy / WEIGHTS).write_bytes(weights[:20] + b" " + weights[21:])
    with pytest.raises(CheckpointError, match="another digest"):
        open_checkpoint(copy)
    (copy / WEIGHTS).write_bytes(weights)
    (copy / "config.json").write_text(config.replace("400", "401"))
    with pytest.raises(CheckpointError, match=r"config.json.*digest"):
        open_checkpoint(copy)


def test_the_command_writes_checks_and_does_not_write_twice(model, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(model), str(out), "-q", "--format", "int4"]
    assert run([*command, "--check"]) == 0
    written, quality = capsys.readouterr().out.splitlines()
    assert written.startswith(f"int4 weights of {model} written to {out}:")
    assert quality.startswith("perplexity on a short text:")
    before = (out / WEIGHTS).stat().st_mtime_ns
    assert run(command) == 0
    assert "up to date" in capsys.readouterr().out
    assert (out / WEIGHTS).stat().st_mtime_ns == before
    assert run([*command[:-1], "int8"]) == EXIT_USAGE
    assert "--overwrite" in capsys.readouterr().err
    assert run([*command[:-1], "int8", "--overwrite"]) == 0
    assert json.loads((out / MANIFEST).read_text())["format"] == "int8"


def test_what_the_command_refuses(model, tmp_path, capsys) -> None:
    assert run(["quantize", str(model), "-q"]) == EXIT_USAGE
    assert "--check" in capsys.readouterr().err
    assert run(["quantize", str(model), str(tmp_path / "o"), "--format", "int5"]) == EXIT_USAGE
    assert "int8, int4" in capsys.readouterr().err
    assert run(["quantize", str(model), str(model), "-q", "--overwrite"]) == EXIT_USAGE
    assert "holds no packed weights" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["quantize", str(tmp_path / "empty"), str(tmp_path / "o"), "-q"]) == EXIT_FAILURE


def test_quantisation_needs_the_native_kernels(model) -> None:
    with pytest.raises(ConfigError, match=r"int4.*bfloat16.*native kernels"):
        LLM(str(model), device="cpu", dtype="float32", quantization="int4")


def test_perplexity_is_that_of_the_logits(model) -> None:
    """The mean of -log p over all tokens but the first, for another text than the built-in one."""
    with LLM(str(model), device="cpu", num_kv_blocks=64) as llm:
        assert llm.llm_engine.tokenizer is not None
        ids = llm.llm_engine.tokenizer.encode("one two three")
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([ids], params, use_tqdm=False)
    places = list(zip(ids, output.prompt_logprobs or [], strict=True))[1:]
    logprobs = torch.tensor([place[token].logprob for token, place in places], dtype=torch.float64)
    found = perplexity("one two three", model=str(model), device="cpu", num_kv_blocks=64)
    assert found == pytest.approx(float((-logprobs.mean()).exp()), rel=1e-6)
