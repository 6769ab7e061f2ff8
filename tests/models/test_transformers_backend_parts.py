"""Decoders on transformers' code: the parts that are ours, and what else engines do with them."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from helpers.cli import run_cli
from helpers.default_model import default_model_path
from helpers.family_models import prompt
from helpers.library_models import (
    family_named,
    library_engine,
    random_model,
    reference,
    reference_logits,
    save,
    saved,
)
from helpers.models import PagedRun, TensorCheckpoint, model_config
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.parameters import read_parameters
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.kernels import native
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.models.transformers_backend.experts import PackedExperts, pack_experts
from tokenmill.models.transformers_backend.layers import LibraryLinear
from tokenmill.models.transformers_backend.library import completed
from tokenmill.models.transformers_backend.ops import ExactOps, our_layers

OPS = {
    "silu": functional.silu,
    "silu in place": lambda x: functional.silu(x.clone(), inplace=True),
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": lambda x: x.sigmoid(),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "tanh": lambda x: x.tanh(),
    "softplus": lambda x: functional.softplus(x, beta=2.0),
    "cos": lambda x: x.cos(),
    "sin": torch.sin,
    "exp": torch.exp,
    "power": lambda x: x.abs() ** 0.3,
    "powers": lambda x: torch.pow(x.abs(), torch.full_like(x, 1.7)),
    "glu": functional.glu,
    "square": lambda x: x.pow(2),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_functions_have_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    """Rows of odd sizes, so that each begins somewhere else in a register."""
    x = (torch.randn(1, 900, 38, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    with ExactOps("AnyForCausalLM"):
        together = OPS[name](x)
        alone = torch.cat([OPS[name](x[:, i : i + 1]) for i in range(0, 900, 60)], dim=1)
        strided = OPS[name](x.repeat(1, 1, 2)[..., :38])
    assert torch.equal(together[:, ::60], alone)
    assert torch.equal(together, strided)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together, OPS[name](x), atol=tolerance, rtol=tolerance)


def test_products_with_a_matrix_have_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*s, generator=generator) for s in ((1, 70, 48), (33, 48)))
    bias = torch.randn(33, generator=generator)
    products = [
        lambda x: functional.linear(x, weight, bias),
        lambda x: x @ weight.t(),
        lambda x: torch.matmul(x, weight.t()),
        lambda x: torch.addmm(bias, x[0], weight.t())[None],
    ]
    with ExactOps("AnyForCausalLM"):
        for product in products:
            alone = torch.cat([product(x[:, i : i + 1]) for i in range(70)], dim=1)
            assert torch.equal(product(x), alone)
            torch.testing.assert_close(alone[0, 0] - alone[0, 1], (x[0, 0] - x[0, 1]) @ weight.t())


def test_what_mixes_tokens_is_refused() -> None:
    x = torch.randn(1, 8, 16)
    refused = {
        "matmul": lambda: torch.matmul(x, x.transpose(1, 2)),
        "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(x, x, x),
        "conv1d": lambda: functional.conv1d(x, torch.randn(4, 8, 3)),
        "roll": lambda: x.roll(1, dims=1),
        "einsum": lambda: torch.einsum("bij,bkj->bik", x, x),
    }
    for name, call in refused.items():
        with ExactOps("AnyForCausalLM"):
            with pytest.raises(ConfigError, match=rf"AnyForCausalLM .*torch's {name}\)"):
                call()
            with our_layers():
                call()
    with ExactOps("AnyForCausalLM"):  # nothing is summed
        assert (x[..., :1] @ x[..., :1].transpose(1, 2)).shape == (1, 8, 8)


def test_rope_that_depends_on_the_length_follows_max_model_len() -> None:
    """The same bits in pieces, though transformers scales angles by the tokens of a pass."""
    settings = family_named("arcee").settings() | {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }
    path = save(random_model("ArceeForCausalLM", settings))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    found = []
    for most_tokens in (256, 30):
        with library_engine(path, "float32", max_num_batched_tokens=most_tokens) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompt(120, 3)}], params, use_tqdm=False)
        steps = output.outputs[0].logprobs or []
        found.append([[entry.logprob for entry in step.values()] for step in steps])
    assert found[0] == found[1]


def test_experts_come_from_a_file_with_three_tensors_each() -> None:
    names = open_checkpoint(saved("olmoe")).tensor_shapes
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_gates_that_the_kernels_know_are_computed_by_them() -> None:
    """The others by the library, expert by expert."""
    for name, is_known in (("olmoe", True), ("granitemoe", True), ("gpt-oss", False)):
        model = copy.deepcopy(reference(name))
        assert pack_experts(model, torch.float32, PlainKernels())
        packed = [each for each in model.modules() if isinstance(each, PackedExperts)]
        assert packed
        assert all((each.method is not None) == is_known for each in packed)


def test_layers_whose_matrix_the_library_reads_stay_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(functional.linear(x, self.up_proj.weight)))

    path, ids = saved("arcee"), prompt(40, 2)
    mlp = type(reference("arcee").model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", forward)
    checkpoint = open_checkpoint(path)
    config = dataclasses.replace(model_config({**checkpoint.config}), implementation="transformers")
    model: Any = load_model(config, checkpoint, kernels=PlainKernels())
    kinds = {
        (type(layer.mlp.up_proj), type(layer.mlp.down_proj)) for layer in model.library.model.layers
    }
    assert kinds == {(torch.nn.Linear, LibraryLinear)}
    with torch.inference_mode():
        found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids))
    torch.testing.assert_close(found, reference_logits("arcee", ids), atol=1e-4, rtol=0)


def test_faults_of_a_checkpoint_are_listed() -> None:
    model = reference("olmoe")
    checkpoint = open_checkpoint(saved("olmoe"))
    tensors = {
        name: checkpoint.read(name).data.view(torch.float32).view(shape)
        for name, shape in checkpoint.tensor_shapes.items()
    }
    config = dataclasses.replace(model_config({**checkpoint.config}), implementation="transformers")
    assert model.config.num_experts == 8

    def load(changed: dict[str, torch.Tensor]) -> None:
        found = TensorCheckpoint(checkpoint.config, changed)
        load_model(config, found, kernels=PlainKernels())

    router = "model.layers.1.mlp.gate.weight"
    missing = {name: tensor for name, tensor in tensors.items() if name != router}
    with pytest.raises(CheckpointError, match=f"1 missing: {router}"):
        load(missing)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.bias"):
        load(tensors | {"model.layers.0.mlp.bias": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=rf"{router} \(8, 100\) for \(8, 128\)"):
        load(tensors | {router: torch.zeros(8, 100)})
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{expert} \(5, 128\) for \(160, 128\)"):
        load(tensors | {expert: torch.zeros(5, 128)})
    without = {name: tensor for name, tensor in tensors.items() if name != expert}
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        load(without)


@pytest.mark.parametrize("name", ["granitemoe", "gpt-neox", "opt"])
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    shutil.copy(saved(name) / "config.json", tmp_path)
    settings: dict[str, Any] = {"load_format": "dummy", "model_impl": "auto", "num_kv_blocks": 8}
    with library_engine(tmp_path, "bfloat16", **settings) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}],
            SamplingParams(max_tokens=4, ignore_eos=True),
            use_tqdm=False,
        )
    assert len(output.outputs[0].token_ids) == 4


def test_sizes_that_a_config_leaves_to_the_library() -> None:
    config = {"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 64, "n_head": 4, "n_layer": 2}
    sizes = completed(config)
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (64, 2)
    assert sizes["num_key_value_heads"] == 1  # multi_query, by default
    assert sizes["max_position_embeddings"] == 1024


def test_latent_attention_keeps_keys_and_values() -> None:
    """What the memory of a pool is planned with is what the layers keep."""
    checkpoint = open_checkpoint(saved("deepseek-v3"))
    planned = read_parameters(checkpoint.config, caches_latents=False)
    config = dataclasses.replace(model_config({**checkpoint.config}), implementation="transformers")
    layers = load_model(config, checkpoint).attention_layers().values()
    assert len(layers) == planned.num_layers
    assert {(each.num_kv_heads, each.head_size) for each in layers} == {(2, 40)}
    assert (planned.num_kv_heads, planned.head_size) == (2, 40)


@pytest.mark.model
@pytest.mark.slow
def test_real_weights_of_another_format() -> None:
    """The default model, a GGUF file, gives the native family's tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for implementation in ("tokenmill", "transformers"):
        settings: dict[str, Any] = {"model_impl": implementation, "skip_tokenizer_init": False}
        with library_engine(default_model_path(), "float32", **settings) as llm:
            (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_inspect_says_whose_code_runs(tmp_path: Path) -> None:
    def inspected(path: Path, *more: str) -> dict[str, Any]:
        result = run_cli("inspect", str(path), "--json", "--quiet", "--device", "cpu", *more)
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    granite = inspected(saved("granite"))
    assert granite["is_supported"]
    assert granite["implementation"] == "transformers"
    assert inspected(saved("llama"))["implementation"] == "tokenmill"
    text = run_cli("inspect", str(saved("granite")), "-q").stdout
    assert "GraniteForCausalLM (runs on transformers' code)" in text

    config = json.loads((saved("granite") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    shutil.copy(saved("granite") / "model.safetensors", tmp_path)
    refused = inspected(tmp_path)
    assert not refused["is_supported"]
    assert refused["implementation"] == ""
    assert "its attention is not causal" in refused["why_not"]


@pytest.mark.parametrize("name", ["phi", "olmoe"])
def test_weights_that_are_packed_beforehand(name: str, tmp_path: Path) -> None:
    if not native.is_available():
        return  # nothing can be packed
    out = tmp_path / "packed"
    result = run_cli("quantize", str(saved(name)), str(out), "--format", "int8", "--quiet")
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for path, settings in ((out, {}), (saved(name), {"quantization": "int8"})):
        with library_engine(path, "bfloat16", model_impl="auto", **settings) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompt(40, 3)}], params, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_embeddings_of_a_model_without_a_head() -> None:
    ids = prompt(30, 4)
    model = reference("stablelm").model
    with LLM(
        str(save(model)),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        max_model_len=64,
    ) as llm:
        (output,) = llm.embed([{"prompt_token_ids": ids}], use_tqdm=False)
    with torch.inference_mode():
        last = model(torch.tensor([ids])).last_hidden_state[0, -1]
    wanted = functional.normalize(last, dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, atol=1e-4, rtol=0)


def test_classes() -> None:
    ids = prompt(30, 4)
    settings = family_named("starcoder2").settings() | {"num_labels": 3}
    torch.manual_seed(5)
    config = transformers.Starcoder2Config(**settings, attn_implementation="eager")
    model = transformers.Starcoder2ForSequenceClassification(config).eval()
    with LLM(
        str(save(model)),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        max_model_len=64,
    ) as llm:
        (output,) = llm.classify([{"prompt_token_ids": ids}], use_tqdm=False)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].softmax(-1)
    torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, atol=1e-4, rtol=0)
