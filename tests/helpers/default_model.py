"""The default model's file, for tests marked `model`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenmill.checkpoint.aliases import DEFAULT_MODEL
from tokenmill.checkpoint.names import resolve_model


@cache
def default_model_path() -> Path:
    """Fetched into the model cache by the first test that asks, if it is not there yet."""
    return resolve_model(DEFAULT_MODEL)
