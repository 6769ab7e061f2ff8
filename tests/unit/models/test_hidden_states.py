"""Hidden states that are kept for a draft head are those that transformers has there."""

from __future__ import annotations

import pytest
import torch

from helpers.families import FAMILIES
from helpers.family_models import prompt, reference, saved
from helpers.models import PagedRun, model_config
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.draft_head import TARGETS
from tokenmill.models.decoder import Decoder
from tokenmill.models.hidden_states import HiddenStates
from tokenmill.models.loader import load_model

NAMES = [family.name for family in FAMILIES if family.architecture in TARGETS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [(0, 1), ()], ids=["inputs of layers", "last"])
def test_they_are_those_of_transformers(name: str, layers: tuple[int, ...]) -> None:
    checkpoint = open_checkpoint(saved(name))
    model = load_model(model_config(checkpoint.config), checkpoint)
    assert isinstance(model, Decoder)
    states = HiddenStates(model, layers, max_num_tokens=64, dtype=torch.float32)
    run = PagedRun(model, "float32")
    ids, other = prompt(9, 1), prompt(5, 2)
    with torch.inference_mode():
        expected = reference(name)(torch.tensor([ids]), output_hidden_states=True).hidden_states
        run.step([("x", ids[:4])])
        run.step([("y", other), ("x", ids[4:])])
    places = torch.arange(5, 10).numpy()
    parts = [expected[layer][0, 4:] for layer in layers] or [expected[-1][0, 4:]]
    torch.testing.assert_close(states.take(places), torch.cat(parts, -1), rtol=1e-3, atol=1e-3)


def test_every_family_that_hands_them_out_is_here() -> None:
    assert len(NAMES) == len(TARGETS)
