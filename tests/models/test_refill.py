"""A model that is filled again holds, at the same addresses, what one has that is filled once."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.families import FAMILIES
from helpers.family_models import saved
from helpers.gguf import tiny_llama, write_llama_gguf
from helpers.models import model_config
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError, InvalidRequestError
from tokenmill.kernels.pages import release_pages
from tokenmill.kernels.state_space import StateCache
from tokenmill.layers.kernels import layer_kernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.layers.state_space import state_layers
from tokenmill.models.loader import load_model
from tokenmill.models.refill import Refill
from tokenmill.quantization.pack_checkpoint import pack_checkpoint

KERNELS = {
    "native": lambda: layer_kernels(torch.bfloat16),
    "int8": lambda: layer_kernels(torch.bfloat16, "int8"),
    "int4": lambda: layer_kernels(torch.bfloat16, "int4"),
    "plain": PlainKernels,
}


def load(path, kernels):
    checkpoint = open_checkpoint(path)
    config = model_config(dict(checkpoint.config), "bfloat16")
    model = load_model(config, checkpoint, kernels=KERNELS[kernels]())
    return model, Refill(model, config, dict(checkpoint.tensor_formats)), checkpoint


def contents(refill):
    return [each.clone() for each in refill.memory()]


def addresses(refill):
    return [each.data_ptr() for each in refill.memory()]


def same(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Another checkpoint of a family's config."""

    def change(name):
        path = tmp_path_factory.mktemp("changed") / name
        shutil.copytree(saved(name), path)
        tensors = load_file(path / "model.safetensors")
        torch.manual_seed(5)
        for tensor_name, tensor in tensors.items():
            tensors[tensor_name] = tensor + 0.1 * torch.rand_like(tensor)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return change


def check_refill(model, refill, fresh, source):
    """That `source` makes of a model what `fresh` has been made of it, in its memory."""
    places, expected = addresses(refill), contents(fresh)
    assert not same(contents(refill), expected)
    refill.check(source)
    refill.from_checkpoint(source)
    assert same(contents(refill), expected)
    for each in refill.memory():
        release_pages(each)
    refill.from_checkpoint(source)
    assert same(contents(refill), expected)
    assert addresses(refill) == places


@pytest.mark.parametrize(
    ("name", "kernels"),
    [(family.name, "native") for family in FAMILIES]
    + [(name, "plain") for name in ("llama", "gpt2", "mixtral", "mamba2")],
)
def test_all_of_a_family_is_replaced(changed, name, kernels):
    _, fresh, source = load(changed(name), kernels)
    model, refill, _ = load(saved(name), kernels)
    before = contents(refill)
    parameters = {each.data_ptr() for each in model.parameters()}
    assert parameters <= {each.data_ptr() for each in refill.memory()} | constants(model)
    check_refill(model, refill, fresh, source)
    refill.from_tensors(load_file(saved(name) / "model.safetensors").items())
    assert same(contents(refill), before)


def constants(model):
    """Parameters that no checkpoint has: biases that are left out."""
    return {
        layer.conv_bias.data_ptr()
        for layer in state_layers(model).values()
        if not layer.has_conv_bias
    }


@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_what_state_space_layers_compute_of_weights_is_computed_anew(changed, kernels):
    fresh, _, source = load(changed("mamba2"), kernels)
    model, refill, _ = load(saved("mamba2"), kernels)
    for each in (fresh, model):
        for layer in state_layers(each).values():
            layer.bind(StateCache.empty(4, layer.state_spec))
    refill.from_checkpoint(source)
    layers = (state_layers(each).values() for each in (model, fresh))
    for layer, expected in zip(*layers, strict=True):
        for name in ("conv_weight", "a"):
            ours, theirs = (getattr(each._derived, name) for each in (layer, expected))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0", "Q4_1"])
def test_blocks_of_a_gguf_file_are_replaced(tmp_path, tensor_type):
    first, second = (
        write_llama_gguf(tmp_path / f"{seed}.gguf", tiny_llama(seed), tensor_type)
        for seed in range(2)
    )
    _, fresh, source = load(second, "native")
    model, refill, _ = load(first, "native")
    check_refill(model, refill, fresh, source)
    other = write_llama_gguf(tmp_path / "other.gguf", tiny_llama(1), "Q5_0")
    with pytest.raises(InvalidRequestError, match=f"has format Q5_0, .* built with {tensor_type}"):
        refill.check(open_checkpoint(other))
    if tensor_type != "F16":
        with pytest.raises(CheckpointError, match="cannot take the place"):
            refill.from_tensors(tiny_llama(1).state_dict().items())


def test_packed_files_are_replaced(changed, tmp_path):
    packed = []
    for name, path in (("first", saved("llama")), ("second", changed("llama"))):
        checkpoint = open_checkpoint(path)
        pack_checkpoint(
            checkpoint, tmp_path / name, "int4", source="here", order=checkpoint.tensor_shapes
        )
        packed.append(tmp_path / name)
    _, fresh, source = load(packed[1], "int4")
    model, refill, own = load(packed[0], "int4")
    before = contents(refill)
    for each in refill.memory():
        release_pages(each)  # matrices are views of the file: its bytes come back by themselves
    refill.from_checkpoint(own)
    assert same(contents(refill), before)
    check_refill(model, refill, fresh, source)


@pytest.mark.parametrize("kernels", ["int8", "int4"])
def test_matrices_are_quantised_again(changed, kernels):
    _, fresh, source = load(changed("mixtral"), kernels)
    model, refill, _ = load(saved("mixtral"), kernels)
    check_refill(model, refill, fresh, source)


def test_a_head_of_its_own_does_not_go_into_a_tied_one(tmp_path):
    paths = []
    for tied in (True, False):
        model = tiny_llama(tie_word_embeddings=tied)
        paths.append(tmp_path / str(tied))
        model.save_pretrained(paths[-1])
    model, refill, _ = load(paths[0], "native")
    with pytest.raises(InvalidRequestError, match="a head of its own"):
        refill.check(open_checkpoint(paths[1]))
    with pytest.raises(CheckpointError, match="a head of its own"):
        refill.from_tensors(load_file(paths[1] / "model.safetensors").items())
    tensors = load_file(paths[0] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    refill.from_tensors(tensors.items())
