"""Every model family on the parts of a GPU."""

from __future__ import annotations

import pytest

from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, reference_logits, saved
from helpers.gpu_engine import generate, gpu_engine
from tokenmill import SamplingParams
from tokenmill.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
"""Integers of a hash wrap; numpy, which Triton's interpreter computes with, warns of that."""


SLOW = {"mamba2": pytest.mark.slow}
"""Whose layers another family has, too."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=SLOW.get(each.name, ()), id=each.name) for each in FAMILIES],
)
def test_tokens_are_those_of_transformers(family: Family) -> None:
    """The tokens of the CPU, or a message that says what is missing."""
    settings = {"dtype": "float32", "num_kv_blocks": 16, "max_model_len": 40}
    ids = prompt(9, 7)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    if not family.runs_on_gpu:
        with pytest.raises(ConfigError, match=r"no kernel for a GPU.*device='cpu'"):
            gpu_engine(saved(family.name), **settings)
        return
    (output,) = generate(gpu_engine(saved(family.name), **settings), [ids], [params])
    found = output.outputs[0].token_ids
    logits = reference_logits(family.name, [*ids, *found[:-1]])
    assert found == logits[len(ids) - 1 :].argmax(-1).tolist()
