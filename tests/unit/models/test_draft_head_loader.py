"""What is wrong with a draft head's files is said by name; a good one is what its tensors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.draft_heads import Tensors, random_head, write_head
from tokenmill.config.draft_head import head_config
from tokenmill.errors import CheckpointError
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.draft_head import DraftHead
from tokenmill.models.draft_head_loader import load_draft_head

TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "vocab_size": 40,
}


class Model:
    """What a head shares with a model."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.full((len(input_ids), TARGET["hidden_size"]), 7.0)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, :1].expand(-1, TARGET["vocab_size"])


def load(path: Path, tensors: Tensors, method: str = "eagle3") -> DraftHead:
    directory = write_head(path, method, tensors, TARGET)
    return load_draft_head(
        method,
        directory,
        head_config(json.loads((Path(directory) / "config.json").read_text())),
        Model(),  # type: ignore[arg-type]
        dtype=torch.float32,
        kernels=PlainKernels(),
        max_model_len=64,
        max_num_tokens=8,
    )


def test_logits_are_those_of_the_models_tokens(tmp_path: Path) -> None:
    tensors = random_head("eagle3", TARGET, own_vocab=12)
    head = load(tmp_path, tensors)
    states = torch.randn(3, TARGET["hidden_size"])
    logits = head.compute_logits(states)
    known = tensors["t2d"].nonzero().flatten()
    torch.testing.assert_close(logits[:, known], states @ tensors["lm_head.weight"].T)
    assert (logits[:, ~tensors["t2d"]] == -torch.inf).all()


@pytest.mark.parametrize("has_embedding", [False, True])
def test_what_a_head_lacks_is_the_models(tmp_path: Path, has_embedding: bool) -> None:
    ids = torch.tensor([3, 1], dtype=torch.int32)
    eagle = load(tmp_path / "1", random_head("eagle", TARGET, has_embedding=has_embedding), "eagle")
    assert (eagle.embed_input_ids(ids) == 7.0).all()
    assert (eagle.compute_logits(torch.full((1, 32), 5.0)) == 5.0).all()
    tensors = random_head("eagle3", TARGET, has_embedding=has_embedding)
    found = load(tmp_path / "3", tensors).embed_input_ids(ids)
    expected = tensors["embed_tokens.weight"][ids] if has_embedding else torch.full((2, 32), 7.0)
    assert torch.equal(found, expected)


def changed(**tensors: torch.Tensor | None) -> Tensors:
    """A head's tensors with some others, or, with None, without them; `__` is a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    merged = random_head("eagle3", TARGET, own_vocab=12) | named
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(d2t=None), r"knows 12 of 40 tokens, but no tensor d2t"),
        (changed(d2t=torch.zeros(11, dtype=torch.int64)), r"d2t is torch.int64 \(11,\).*\(12,\)"),
        (changed(d2t=torch.zeros(12)), r"d2t is torch.float32 \(12,\), but must be integers"),
        (changed(d2t=torch.zeros(12, dtype=torch.bool)), r"d2t is torch.bool \(12,\), but must be"),
        (changed(d2t=torch.full((12,), 30)), r"d2t leads to tokens outside of 0 to 39"),
        (changed(d2t=torch.full((12,), -1)), r"d2t leads to tokens outside of 0 to 39"),
        (changed(norm__weight=None), r"1 missing: norm.weight"),
        (changed(fc_norm__weight=torch.ones(32)), r"1 unexpected: fc_norm.weight"),
        (
            changed(layer__mlp__up_proj__weight=torch.zeros(47, 32)),
            r"1 of a wrong shape: midlayer.mlp.up_proj.weight \(47, 32\) for \(48, 32\)",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors)


def test_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tokenmill.models.draft_head_loader.open_checkpoint"
    monkeypatch.setattr(module, lambda path: object())
    with pytest.raises(CheckpointError, match=r"read from safetensors as it was published"):
        load(tmp_path, changed())
