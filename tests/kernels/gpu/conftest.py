"""The device of the Triton kernels' tests: a GPU, or the CPU under Triton's interpreter."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

if os.environ["TRITON_INTERPRET"] == "1":
    from helpers.triton_interpreter import (
        loop_over_scalars,
        patch_the_language_once,
        round_like_a_gpu,
    )

    round_like_a_gpu()
    loop_over_scalars()
    patch_the_language_once()


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


@pytest.fixture(autouse=True)
def _interpreter_warnings() -> Iterator[None]:
    """Integers of a hash wrap; numpy, which the interpreter computes with, warns of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="overflow encountered")
        torch.manual_seed(0)
        yield
