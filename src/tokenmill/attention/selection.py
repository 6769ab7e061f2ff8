"""Which attention backend is used, and why not the others.

Backends of other packages are named by their path, or announced by an entry point
(`docs/add-an-attention-backend.md`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tokenmill.attention.backend import AttentionBackend, AttentionSpec
from tokenmill.errors import ConfigError, did_you_mean


def _reference() -> AttentionBackend:
    from tokenmill.attention.reference import ReferenceBackend

    return ReferenceBackend()


def _cpu() -> AttentionBackend:
    from tokenmill.attention.cpu import CpuBackend

    return CpuBackend()


def _triton() -> AttentionBackend:
    from tokenmill.attention.triton import TritonBackend

    return TritonBackend()


def _flash_attn() -> AttentionBackend:
    from tokenmill.attention.flash import FlashBackend

    return FlashBackend()


def _flashinfer() -> AttentionBackend:
    from tokenmill.attention.flashinfer import FlashInferBackend

    return FlashInferBackend()


def _sdpa() -> AttentionBackend:
    from tokenmill.attention.sdpa import SdpaBackend

    return SdpaBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": _cpu,
    "triton": _triton,
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
    "sdpa": _sdpa,
    "reference": _reference,
}

ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "flash_attn", "flashinfer", "sdpa", "reference"),
}
"""By device, the best first: `auto` takes the first that supports the model and the machine."""


ENTRY_POINTS = "tokenmill.attention_backends"
"""The group in which packages announce backends by name."""


def select_backend(name: str, spec: AttentionSpec) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The backend called `name`, or the best for `auto`, and the reasons for the choice.

    `name` may also be `module:Class`, or an entry point's. Raises `ConfigError` if there is no such
    backend or no candidate supports `spec`.
    """
    reasons: list[str] = []
    for candidate in ORDER[spec.device] if name == "auto" else [name]:
        backend = BACKENDS[candidate]() if candidate in BACKENDS else _load(candidate)
        refusals = backend.unsupported_reasons(spec)
        if not refusals:
            why = "the best that supports this model here" if name == "auto" else "asked for"
            return backend, (*reasons, f"{candidate}: {why}")
        reasons.append(f"{candidate}: {'; '.join(refusals)}")
    raise ConfigError(f"No attention backend supports this model. {'. '.join(reasons)}.")


def _load(name: str) -> AttentionBackend:
    """A backend of another package."""
    made = _find(name)
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise _not_loaded(name, error) from error
    missing = [part for part in _parts_of_a_backend() if not hasattr(made, part)]
    if missing:
        raise ConfigError(
            f"attention_backend={name!r} is no attention backend: it has no {', '.join(missing)}"
            f" (see docs/add-an-attention-backend.md)."
        )
    backend: AttentionBackend = made
    return backend


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    if not path:
        announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            known = ["auto", *BACKENDS, *sorted(announced)]
            raise ConfigError(
                f"attention_backend={name!r} is unknown.{did_you_mean(name, known)}"
                f" Known: {', '.join(known)}, or `module:Class` of a backend of your own."
            )
        module, path = announced[name].module, announced[name].attr
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise _not_loaded(name, error) from error
    return found


def _not_loaded(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"attention_backend={name!r} could not be loaded: {type(error).__name__}: {error}"
    )


def _parts_of_a_backend() -> list[str]:
    return [part for part in vars(AttentionBackend) if not part.startswith("_")]
