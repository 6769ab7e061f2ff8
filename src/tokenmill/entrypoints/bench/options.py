"""What may be set about a measurement; the flags are derived from these classes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tokenmill.config.argument_types import at_least
from tokenmill.errors import ConfigError, shown


def positive_ints(name: str, text: str) -> list[int]:
    """`1,4,16` as numbers. Raises `ConfigError` that names the option."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{name}={shown(text)} must be positive integers with commas: 1,16,256.")
    return numbers


class _Positive:
    """Refuses fields that are not positive integers."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if each.type == "int":
                at_least(each.name, getattr(self, each.name), 0 if "warmup" in each.name else 1)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(_Positive):
    """One batch, several times. Raises `ConfigError`."""

    batch_size: int = 1
    """Requests at the same time."""
    input_len: int = 128
    """Tokens of each prompt; they are random."""
    output_len: int = 128
    """Tokens generated for each."""
    num_iters: int = 5
    """How often the batch is run; figures are medians."""
    num_iters_warmup: int = 1
    """Runs before these, which do not count."""


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(_Positive):
    """Many requests, queued at once. Raises `ConfigError`."""

    num_prompts: int = 64
    """Requests."""
    input_len: int = 128
    """Tokens of each prompt; they are random."""
    output_len: int = 128
    """Tokens generated for each."""
    num_iters: int = 1
    """How often all of them are run; figures are medians."""
    num_iters_warmup: int = 1
    """Runs before these, with an eighth of the requests, which do not count."""


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Kernels by themselves, in the shapes of the model. Raises `ConfigError`."""

    rows: str = "1,4,16,64,256,1024"
    """Numbers of rows (tokens of a step), with commas."""
    formats: str = "auto"
    """Weight formats, with commas: bf16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, torch; with float32, f32 and
    torch. auto takes the model's and bf16 or f32."""
    contexts: str = "256,1024"
    """Lengths of the requests whose tokens attention decodes, with commas."""
    seconds: float = 0.1
    """Time for each figure; it is the best of many short rounds."""

    def __post_init__(self) -> None:
        positive_ints("rows", self.rows)
        positive_ints("contexts", self.contexts)
        if not 0 < self.seconds <= 60:
            raise ConfigError(f"seconds={self.seconds} must lie in (0, 60].")


@dataclass(frozen=True, kw_only=True)
class StartupOptions(_Positive):
    """Fresh processes, one after the other. Raises `ConfigError`."""

    num_iters: int = 3
    """Processes; figures are medians."""
