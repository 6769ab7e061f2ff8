"""Towers on small random weights: transformers' embeddings, under any names of tensors, and the
same bits however they are computed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.models import PagedRun
from helpers.vision_families import VISION_FAMILIES, VisionFamily
from helpers.vision_models import (
    load,
    picture,
    processor_of,
    reference,
    reference_embeddings,
    saved,
    tensors,
)
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.kv_layout import model_windows
from tokenmill.config.parameters import read_parameters
from tokenmill.config.resolve import apply_overrides
from tokenmill.config.windows import layer_windows
from tokenmill.contracts.request import MultiModalFeature, TensorData
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.features.multimodal.processing import ProcessedImage
from tokenmill.kernels import native
from tokenmill.layers.kernels import layer_kernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import tensor_shapes, weight_slots

over_families = pytest.mark.parametrize("family", VISION_FAMILIES, ids=lambda family: family.name)
SIZES = [(64, 48), (20, 31)]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@over_families
def test_embeddings_equal_transformers(family: VisionFamily, kernels: str) -> None:
    model = load(saved(family.name), kernels=PlainKernels() if kernels == "torch" else None)
    processor = processor_of(family.name)
    for width, height in SIZES:
        image = picture(width, height)
        processed = processor.process(image, {})
        with torch.inference_mode():
            found = model.encode("image", tensors(processed))
        wanted = reference_embeddings(family.name, image)
        assert len(found) == sum(count for _, count in processed.embed_spans)
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@over_families
def test_the_same_bits_again_and_with_other_threads(family: VisionFamily, dtype: str) -> None:
    model = load(saved(family.name), dtype)
    processor = processor_of(family.name)
    first, other = (tensors(processor.process(picture(*size), {})) for size in SIZES)
    before = torch.get_num_threads(), os.cpu_count() or 1
    try:
        with torch.inference_mode():
            set_num_threads(1, 1)
            alone = model.encode("image", first)
            model.encode("image", other)
            set_num_threads(3, 2)
            again = model.encode("image", first)
    finally:
        set_num_threads(*before)
    assert torch.equal(alone, again)
    assert alone.dtype == getattr(torch, dtype)


def set_num_threads(of_torch: int, of_kernels: int) -> None:
    torch.set_num_threads(of_torch)
    native.set_num_threads(of_kernels)


@over_families
def test_text_alone_runs_as_on_the_decoder(family: VisionFamily) -> None:
    model = load(saved(family.name))
    ids = [5, 17, 200, 33, 90, 41, 7] * 9
    with torch.inference_mode():
        wanted = reference(family.name)(torch.tensor([ids])).logits[0]
        found = model.compute_logits(PagedRun(model, "float32").prefill("a", ids, chunk=20))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@over_families
def test_other_names_of_tensors(family: VisionFamily, tmp_path: Path) -> None:
    """Hubs have files from before and after the decoder got a name of its own in the library."""
    source = saved(family.name)
    state = reference(family.name).state_dict()
    renamed = tmp_path / "new"
    shutil.copytree(source, renamed)
    tied = not (source / "model.safetensors").read_bytes().count(b"lm_head")
    save_file(
        {
            name: tensor.contiguous()
            for name, tensor in state.items()
            if not (tied and name.startswith("lm_head"))
        },
        renamed / "model.safetensors",
    )
    old = tmp_path / "old"
    shutil.copytree(source, old)
    save_file(
        {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in load_file(source / "model.safetensors").items()
        },
        old / "model.safetensors",
    )
    inputs = tensors(processor_of(family.name).process(picture(40, 30), {}))
    with torch.inference_mode():
        wanted = load(source).encode("image", inputs)
        for path in (renamed, old):
            assert torch.equal(load(path).encode("image", inputs), wanted)
            assert set(open_checkpoint(path).tensor_shapes) == set(
                open_checkpoint(source).tensor_shapes
            )


@over_families
def test_shapes_without_weights(family: VisionFamily) -> None:
    checkpoint = open_checkpoint(saved(family.name))
    shapes = tensor_shapes(checkpoint.config)
    assert all(checkpoint.tensor_shapes[name] == shape for name, shape in shapes.items())
    assert set(shapes) == {slot.name for slot in weight_slots(load(saved(family.name)))}


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_experts_that_hubs_have_transposed(kernels: str, tmp_path: Path) -> None:
    source = saved("qwen3-vl-moe")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    tensors_of_file = load_file(source / "model.safetensors")
    save_file(
        {
            name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
            for name, tensor in tensors_of_file.items()
        },
        tmp_path / "model.safetensors",
    )
    layouts = [open_checkpoint(path).config["expert_layout"] for path in (source, tmp_path)]
    assert layouts == ["fused", "fused_transposed"]
    ids = [5, 17, 200, 33, 90]
    chosen = PlainKernels() if kernels == "torch" else None
    with torch.inference_mode():
        found, wanted = (
            each.compute_logits(PagedRun(each, "float32").prefill("a", ids))
            for each in (load(path, kernels=chosen) for path in (tmp_path, source))
        )
    assert torch.equal(found, wanted)


over_qwen = pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])


@over_qwen
def test_three_positions_of_each_token(name: str) -> None:
    """transformers' for a prompt of texts and two images."""
    processor = processor_of(name)
    token_ids, features, grids = [5, 6, 7], [], []
    for seed, size in enumerate(SIZES):
        processed = processor.process(picture(*size, seed), {})
        features.append(feature(processed, offset=len(token_ids)))
        token_ids += [*processed.token_ids, 9, 10]
        _, height, width, _ = processed.inputs["pixels"].shape
        grids.append([1, height // 4, width // 4])
    model = load(saved(name))
    assert model.mrope_positions(token_ids[:3], []) is None
    found = model.mrope_positions(token_ids, features[::-1])
    assert found is not None
    assert found.dtype == np.int64
    is_image = torch.tensor([token_ids]) == processor.mark_token_id
    wanted, delta = reference(name).model.get_rope_index(
        torch.tensor([token_ids]), is_image.int(), torch.tensor(grids)
    )
    np.testing.assert_array_equal(found, wanted[:, 0].numpy())
    assert found.max() + 1 - len(token_ids) == int(delta)
    assert found.max() < len(token_ids)  # tables of angles are long enough


@over_qwen
def test_frequencies_go_by_one_of_three_positions(name: str) -> None:
    model = load(saved(name))
    (rotary, *others) = {layer.rotary for layer in model.attention_layers().values()}
    assert not others
    positions = torch.tensor([[0, 3, 3, 9], [0, 4, 5, 9], [0, 6, 7, 9]])
    rows = rotary.reserve(4) + torch.arange(4)
    rotary.write(rows, positions)
    theirs = reference(name).model.language_model.rotary_emb
    cos, sin = theirs(torch.zeros(1), positions[:, None])
    half = cos.shape[-1] // 2
    found = rotary.at(rows)
    torch.testing.assert_close(found.cos[found.positions], cos[0, :, :half])
    torch.testing.assert_close(found.sin[found.positions], sin[0, :, :half])
    assert torch.equal(rotary.cos[[0, 9]], rotary.cos[rows[[0, 3]]])


def feature(processed: ProcessedImage, offset: int) -> MultiModalFeature:
    """As a front end sends it."""
    return MultiModalFeature(
        content_hash="",
        modality="image",
        offset=offset,
        length=len(processed.token_ids),
        inputs={
            name: TensorData(str(array.dtype), array.shape, array.tobytes())
            for name, array in processed.inputs.items()
        },
        embed_spans=processed.embed_spans,
    )


def edited(tmp_path: Path, name: str, **changes: object) -> Path:
    """A copy of a model whose config.json says something else."""
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llava", {"vision_feature_layer": 7}, r"vision_feature_layer=7 .* from -4 to 3"),
        ("llava", {"vision_feature_layer": []}, "must be one or several"),
        ("llava", {"vision_feature_select_strategy": "cls"}, "'cls' is not supported"),
        ("llava", {"projector_hidden_act": "mish"}, "projector_hidden_act='mish'"),
        ("llava", {"vision_config": {"model_type": "idefics3"}}, "LLaVA is not supported with"),
        (
            "qwen2-vl",
            {"text_config": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2, 3]}}},
            "three counts that add up to 32",
        ),
        ("qwen2-vl", {"vision_config": {"num_heads": 3}}, "3 heads of 64 values"),
        ("qwen2-vl", {"vision_config": {"hidden_size": 64}}, "embeddings of 64 values"),
        ("qwen2.5-vl", {"vision_config": {"fullatt_block_indexes": 3}}, "a list of layers"),
        ("mistral3", {"vision_feature_layer": [1, 2]}, "must be one of the tower's layers"),
        ("mistral3", {"vision_config": {"model_type": "idefics3"}}, "with 'pixtral' only"),
        ("pixtral", {"vision_config": {"hidden_act": "mish"}}, "hidden_act='mish'"),
        (
            "qwen3-vl",
            {"vision_config": {"deepstack_visual_indexes": [3]}},
            "some of the tower's 3 layers",
        ),
        ("qwen3-vl", {"vision_config": {"num_position_embeddings": 26}}, "26 is no square"),
        ("qwen3-vl", {"text_config": {"num_hidden_layers": 1}}, "more than the 1 of the decoder"),
        ("smolvlm", {"scale_factor": 3}, "not a multiple of scale_factor=3"),
        ("llava-next", {"vision_feature_select_strategy": "full"}, "a state for each patch"),
        ("llava-onevision", {"vision_feature_select_strategy": "default"}, "'full' for SigLIP"),
        ("llava-next", {"vision_config": {"model_type": "pixtral"}}, "LLaVA is not supported"),
        ("internvl", {"vision_feature_layer": [1, 2]}, "must be one of the tower's layers"),
        ("internvl", {"vision_feature_select_strategy": "full"}, "strategy 'default'"),
        ("internvl", {"downsample_ratio": 0.3}, "squares of 3"),
        ("internvl", {"downsample_ratio": 0}, "squares of 0"),
        ("internvl", {"downsample_ratio": "x"}, "downsample_ratio is 'x', but must be a finite"),
        ("internvl", {"vision_config": {"norm_type": "batch"}}, "norm_type='batch'"),
        ("internvl", {"vision_config": {"image_size": [28, 35]}}, "image_size"),
        ("gemma3", {"mm_tokens_per_image": 8}, "mm_tokens_per_image=8 must be a square"),
        ("gemma3", {"mm_tokens_per_image": 16}, "divides the tower's 6 patches an edge"),
        ("smolvlm", {"vision_config": {"num_attention_heads": 5}}, "5 heads, which do not divide"),
    ],
)
def test_configs_that_cannot_work(
    name: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(edited(tmp_path, name, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "olmo2"}}, "text_config has model_type='olmo2'"),
        ({"vision_config": {"model_type": "dinov2"}}, "vision_config has model_type='dinov2'"),
        ({"text_config": [1]}, r"text_config is \[1\], but must be an object"),
    ],
)
def test_parts_that_are_not_known(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(edited(tmp_path, "llava", **changes))


def test_qwen2_vl_as_hubs_have_it(tmp_path: Path) -> None:
    """The decoder's parameters at the top, and a type of RoPE that is none."""
    path = edited(tmp_path, "qwen2-vl")
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [12, 10, 10]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    config["vision_config"]["model_type"] = "qwen2_vl"
    (path / "config.json").write_text(json.dumps(text | config | {"model_type": "qwen2_vl"}))
    ids = [5, 17, 200, 33, 90]
    with torch.inference_mode():
        found, wanted = (
            each.compute_logits(PagedRun(each, "float32").prefill("a", ids))
            for each in (load(path), load(saved("qwen2-vl")))
        )
    assert torch.equal(found, wanted)


def test_what_a_config_leaves_out_is_the_library_s_default(tmp_path: Path) -> None:
    path = edited(tmp_path, "llava")
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "eos_token_id": 7,
        "pad_token_id": 9,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "llama", "vocab_size": 32064, "eos_token_id": None},
    }
    (path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(path).config
    assert found["vocab_size"] == 32064
    assert (found["hidden_size"], found["num_hidden_layers"]) == (4096, 32)
    assert (found["eos_token_id"], found["pad_token_id"]) == (7, 9)
    assert found["tie_word_embeddings"]
    assert found["vision_config"]["image_size"] == 336
    assert found["image_token_id"] == 32000
    assert found["decoder_architecture"] == "LlamaForCausalLM"


def test_what_a_config_of_llava_onevision_leaves_out(tmp_path: Path) -> None:
    path = edited(tmp_path, "llava-onevision")
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlavaOnevisionForConditionalGeneration"],
                "text_config": {"model_type": "qwen2"},
                "image_grid_pinpoints": None,
            }
        )
    )
    found = open_checkpoint(path).config
    theirs = transformers.LlavaOnevisionConfig()
    for key in (
        "image_grid_pinpoints",
        "vision_aspect_ratio",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "image_token_id",
    ):
        assert found[key] == getattr(theirs, key), key
    for key in ("image_size", "patch_size", "num_hidden_layers", "hidden_size", "hidden_act"):
        assert found["vision_config"][key] == getattr(theirs.vision_config, key), key


def test_overrides_reach_the_parts() -> None:
    config = open_checkpoint(saved("llava")).config
    found = apply_overrides(
        config,
        {
            "text_config": '{"rope_theta": 5.0}',
            "vision_config": {"image_size": 44},
            "max_position_embeddings": 64,
        },
    )
    assert (found["rope_theta"], found["max_position_embeddings"]) == (5.0, 64)
    assert found["vision_config"] == {**config["vision_config"], "image_size": 44}
    assert "text_config" not in found
    assert apply_overrides(config, {}) == config


def test_windows_are_those_of_the_decoder_s_family() -> None:
    """Before `layer_types`, whether there are any at all was the family's rule."""
    config = dict(open_checkpoint(saved("llava-siglip")).config)
    parameters = read_parameters(config)
    assert model_windows(config, parameters, "tokenmill") == (None, 21)
    del config["layer_types"]
    assert layer_windows(config) == (None, 21)
    config |= {"use_sliding_window": False, "sliding_window": 21}
    assert layer_windows(config) == (None, None)
    assert model_windows(config, parameters, "tokenmill") == (None, None)


def test_a_tower_is_not_quantised_with_its_decoder() -> None:
    if not native.is_available():
        return  # nothing is
    inputs = tensors(processor_of("qwen2-vl").process(picture(64, 48), {}))
    path = saved("qwen2-vl")
    with torch.inference_mode():
        plain, quantised = (
            load(path, "bfloat16", layer_kernels(torch.bfloat16, quantization)).encode(
                "image", inputs
            )
            for quantization in (None, "int4")
        )
    assert torch.equal(plain, quantised)


def test_the_ledger_counts_what_is_kept() -> None:
    kept = {}
    for name in ("qwen2.5-vl", "qwen3-vl"):
        settings: dict[str, Any] = {"num_kv_blocks": 8, "max_model_len": 128}
        with LLM(str(saved(name)), device="cpu", encoder_cache_size=64, **settings) as llm:
            kept[name] = llm.llm_engine.config.ledger.encoder_cache
    assert kept["qwen2.5-vl"] == 64 * 128 * 2
    assert kept["qwen3-vl"] == 3 * kept["qwen2.5-vl"]  # two levels


def test_the_library_s_code_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"model_impl='transformers' serves no models with a vision"
    ):
        LLM(str(saved("llava")), model_impl="transformers", skip_tokenizer_init=True)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"load_format": "dummy"}])
@over_families
def test_text_alone_in_an_engine(
    family: VisionFamily, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are recorded as those of a decoder without a tower, whose format the tower keeps."""
    if not native.is_available():
        return  # nothing is recorded or quantised
    path = saved(family.name)
    sizes = {"num_kv_blocks": 8, "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with (
        caplog.at_level(logging.INFO, logger="tokenmill"),
        LLM(str(path), device="cpu", skip_tokenizer_init=True, **sizes, **settings) as llm,
    ):
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7] * 9}, params, use_tqdm=False)
        weights = llm.llm_engine.config.ledger.weights
    assert "forward pass recorded" in caplog.text
    assert len(output.outputs[0].token_ids) == 4
    if "quantization" in settings:
        checkpoint = open_checkpoint(path)
        num_values = {name: prod(shape) for name, shape in checkpoint.tensor_shapes.items()}
        tower = sum(count for name, count in num_values.items() if is_of_tower(name))
        decoder = sum(num_values.values()) - tower
        assert 2 * tower + decoder < weights < 2 * tower + 1.2 * decoder
