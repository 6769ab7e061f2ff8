"""The device of the Triton kernels' tests: a GPU, or the CPU under Triton's interpreter."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
if IS_INTERPRETED:
    from helpers.triton_interpreter import adapt_interpreter, overflow_is_an_error

    adapt_interpreter()


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _interpreter_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Integers of a hash wrap; numpy, which the interpreter computes with, warns of that.

    Sums of integers are checked where slow tests run, too.
    """
    with_slow_tests = request.config.option.markexpr != "not slow"
    is_checked = IS_INTERPRETED and with_slow_tests
    with warnings.catch_warnings(), overflow_is_an_error() if is_checked else nullcontext():
        warnings.filterwarnings("ignore", message="overflow encountered")
        torch.manual_seed(0)
        yield
