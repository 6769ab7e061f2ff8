"""Which attention backend is used, and why not the others."""

from __future__ import annotations

from collections.abc import Callable

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


def select_backend(name: str, spec: AttentionSpec) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The backend called `name`, or the best for `auto`, and the reasons for the choice.

    Raises `ConfigError` if the name is unknown or no candidate supports `spec`.
    """
    if name != "auto" and name not in BACKENDS:
        known = ["auto", *BACKENDS]
        raise ConfigError(
            f"attention_backend={name!r} is unknown.{did_you_mean(name, known)}"
            f" Known: {', '.join(known)}."
        )
    reasons: list[str] = []
    for candidate in ORDER[spec.device] if name == "auto" else [name]:
        backend = BACKENDS[candidate]()
        refusals = backend.unsupported_reasons(spec)
        if not refusals:
            why = "the best that supports this model here" if name == "auto" else "asked for"
            return backend, (*reasons, f"{candidate}: {why}")
        reasons.append(f"{candidate}: {'; '.join(refusals)}")
    raise ConfigError(f"No attention backend supports this model. {'. '.join(reasons)}.")
