"""What does not run on transformers' code is refused by name, before a weight is read."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import pytest
import torch
import transformers

from helpers.families import COMMON
from helpers.models import TensorCheckpoint, model_config
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.models.registry import choose_implementation
from tokenmill.models.transformers_backend import library
from tokenmill.models.transformers_backend.library import LibraryModel, causal_name
from tokenmill.models.transformers_backend.probe import LayerProbe, check_rows_are_their_own


def config_of(architecture: str, **different: Any) -> dict[str, Any]:
    settings = {key: value for key, value in (COMMON | different).items() if value is not None}
    config = getattr(transformers, architecture).config_class(**settings)
    return {**COMMON, **config.to_dict(), "architectures": [architecture]}


def load(hf_config: dict[str, Any], **settings: Any) -> None:
    """From a checkpoint without any tensor: whatever is refused is refused before weights."""
    config = dataclasses.replace(model_config(hf_config), implementation="transformers")
    load_model(config, TensorCheckpoint(hf_config, {}), kernels=PlainKernels(), **settings)


@pytest.mark.parametrize(
    ("architecture", "different", "reason"),
    [
        ("FalconForCausalLM", {}, "does not go through the library's attention interface"),
        (
            "OpenAIGPTLMHeadModel",
            {},
            "multiplies activations with each other outside the attention",
        ),
        ("BloomForCausalLM", {}, "takes no position_ids"),
        ("MptForCausalLM", {}, "takes no position_ids"),
        ("BartForCausalLM", {"is_encoder_decoder": False}, "takes no input_ids"),
        ("DogeForCausalLM", {}, "changes the mask of its attention .as ALiBi"),
        ("MambaForCausalLM", {}, "layers are of type linear_attention"),
        ("RwkvForCausalLM", {}, "keeps a recurrent state"),
        ("Llama4ForCausalLM", {}, "layers are of type chunked_attention"),
        ("HrmTextForCausalLM", {}, "runs an attention layer several times"),
        ("BertLMHeadModel", {}, "attention is not causal"),
        ("LlamaForCausalLM", {"is_causal": False}, "attention is not causal"),
        ("GitForCausalLM", {}, "takes more than text .config.json has vision_config"),
    ],
)
def test_refused_by_name(architecture: str, different: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{architecture} cannot run through .* {reason}"):
        load(config_of(architecture, **different))


def test_what_is_served_asks_for_its_weights() -> None:
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        load(config_of("ArceeForCausalLM", num_hidden_layers=1))


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "ViTForImageClassification"])
def test_only_decoders_of_text(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' are not supported.*only decoders of text"):
        causal_name(name)


def test_unknown_architectures() -> None:
    config = config_of("LlamaForCausalLM") | {"architectures": ["FrobForCausalLM"]}
    with pytest.raises(
        ConfigError, match="has no class 'FrobForCausalLM', and there is no native family"
    ):
        load(config)
    with pytest.raises(ConfigError, match="Did you mean 'LlamaForCausalLM'"):
        load(config | {"architectures": ["LamaForCausalLM"]})
    with pytest.raises(ConfigError, match="never runs code that comes with weights"):
        load(config | {"auto_map": {"AutoModelForCausalLM": "modeling.FrobForCausalLM"}})


def test_a_config_that_the_library_refuses() -> None:
    config = config_of("GraniteForCausalLM")
    with pytest.raises(ConfigError, match="GraniteConfig refuses it"):
        load(config | {"hidden_size": "wide"})


def test_the_library_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install = r'pip install "tokenmill\[transformers\]"'
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.3.0")
    library.load_library.cache_clear()
    with pytest.raises(ConfigError, match=rf"transformers 5.3.0 .* at least 5.20 .*{install}"):
        library.load_library()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=install):
        library.load_library()
    with pytest.raises(ConfigError, match=rf"'GraniteForCausalLM' have no native .*{install}"):
        choose_implementation("auto", "GraniteForCausalLM")
    with pytest.raises(ConfigError, match=install):
        choose_implementation("transformers", "LlamaForCausalLM")
    assert choose_implementation("auto", "LlamaForCausalLM") == "tokenmill"


def test_model_impl() -> None:
    assert choose_implementation("auto", "GraniteForCausalLM") == "transformers"
    assert choose_implementation("transformers", "LlamaForCausalLM") == "transformers"
    with pytest.raises(ConfigError, match="'GraniteForCausalLM' are not supported"):
        choose_implementation("tokenmill", "GraniteForCausalLM")
    with pytest.raises(ConfigError, match=r"model_impl='vllm' is not one of: auto, tokenmill"):
        choose_implementation("vllm", "LlamaForCausalLM")


def test_a_gpu_is_refused() -> None:
    config = config_of("GraniteForCausalLM")
    settings = dataclasses.replace(model_config(config), implementation="transformers")
    kernels = PlainKernels(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"no path on a GPU yet.*device='cpu'"):
        load_model(settings, TensorCheckpoint(config, {}), kernels=kernels)


MODEL = LibraryModel("AnyForCausalLM", None, None)


class TestMasks:
    """A mask's rule is read off its function, as transformers makes it."""

    def window(self, function: Any) -> int | None:
        probe = LayerProbe(MODEL)
        mask = probe.mask(function, 4, None)
        return probe._window(torch.nn.Identity(), mask[:, :, :2], {})

    def test_causal_and_sliding(self) -> None:
        masks = transformers.masking_utils
        assert self.window(masks.causal_mask_function) is None
        assert self.window(masks.sliding_window_causal_mask_function(23)) == 23
        assert self.window(masks.sliding_window_causal_mask_function(40_000)) == 40_000

    def test_others_are_refused(self) -> None:
        masks = transformers.masking_utils
        chunked = masks.chunked_causal_mask_function(4096, torch.zeros(1, dtype=torch.int64))
        with pytest.raises(ConfigError, match="chunked attention"):
            self.window(chunked)
        with pytest.raises(ConfigError, match="not causal"):
            self.window(masks.bidirectional_mask_function)
        with pytest.raises(ConfigError, match="depends on more than the positions"):
            self.window(masks.packed_sequence_mask_function(torch.zeros(1, 4)))
        with pytest.raises(ConfigError, match="has gaps"):
            self.window(lambda b, h, q, k: (k <= q) & (k % 2 == 0))

    def test_a_changed_mask_is_refused(self) -> None:
        probe = LayerProbe(MODEL)
        mask = probe.mask(transformers.masking_utils.causal_mask_function, 4, None)
        with pytest.raises(ConfigError, match="changes the mask"):
            probe._window(torch.nn.Identity(), mask + 1.0, {})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"position_bias": torch.zeros(4)}, "is given position_bias=.*ours does not know"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"s_aux": torch.zeros(2, 2)}, "not one score a head"),
    ],
)
def test_settings_of_attention(settings: dict[str, Any], reason: str) -> None:
    probe = LayerProbe(MODEL)
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ConfigError, match=reason):
        probe.attend(torch.nn.Identity(), x, x, x, None, settings)


def test_layers_with_a_cache_of_their_own() -> None:
    x = torch.zeros(1, 2, 4, 8)
    keys = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ConfigError, match="from 4 to 6 tokens of a pass"):
        LayerProbe(MODEL).attend(torch.nn.Identity(), x, keys, keys, None, {})


class TestRows:
    """Tokens of a batch must have nothing to do with each other outside attention."""

    def check(self, run: Any) -> bool:
        return check_rows_are_their_own(MODEL, run, vocab_size=50, longest=20)

    def test_their_own(self) -> None:
        assert self.check(lambda ids, positions: torch.stack([ids, positions], 1).float())

    def test_mixed(self) -> None:
        with pytest.raises(ConfigError, match="its code mixes tokens"):
            self.check(lambda ids, positions: ids.float().cumsum(0)[:, None])

    def test_positions_of_their_own_making(self) -> None:
        with pytest.raises(ConfigError, match="takes positions from somewhere else"):
            self.check(lambda ids, positions: torch.arange(len(ids))[:, None].float())

    def test_roundings(self) -> None:
        assert not self.check(lambda ids, positions: (ids + 1e-4 * len(ids))[:, None])
