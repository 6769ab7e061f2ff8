"""Rotary position embedding: frequencies of every scaling type, and the table of angles.

Types and keys are those of Hugging Face configs:

    default   theta ** (-2i / rotary_dim)
    linear    positions divided by `factor`
    dynamic   a larger theta, for the length at hand (NTK)
    llama3    long wavelengths divided by `factor`, short ones kept, a ramp between
    yarn      the same with a ramp over dimensions, and larger attention scores (Peng et al., 2023)
    longrope  a divisor for each frequency (Ding et al., 2024); once called su

`dynamic` and `longrope` depend on a length. It is `max_model_len`, once and for all: with the
length of the text so far, a token's key would change while its text grows, and a cached key would
be wrong.

With `mrope_section`, a token has three positions (time, height, width), and each of its frequencies
goes by one of them (Wang et al., 2024, Qwen2-VL): so many by the first, then by the second, then by
the third, or, with `mrope_interleaved`, by the three in turn while there are any. Tokens whose
positions differ have rows of their own in the table (`reserve`, `write`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.attention.backend import Rotation
from tokenmill.config.parameters import number, positive_int, rope_parameters
from tokenmill.errors import ConfigError, did_you_mean, shown


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The RoPE settings of one model, read from its config."""

    rope_type: str
    theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Length of the first training, before scaling."""
    scaling: Mapping[str, Any]
    """What is special to the type: `factor`, `low_freq_factor`, `beta_fast`, ..."""
    freq_factors: Sequence[float] | None
    """A divisor for each frequency; GGUF files keep the result of a scaling so."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters`, or `rope_scaling` and `rope_theta`.

        Raises `ConfigError` for a type we do not know.
        """
        scaling = rope_parameters(hf_config)
        rope_type = scaling["rope_type"]
        if rope_type not in _SCALINGS:
            raise ConfigError(
                f"RoPE type {rope_type!r} is not supported."
                f"{did_you_mean(str(rope_type), _SCALINGS)} Known types: {', '.join(_SCALINGS)}."
            )
        longest = positive_int(hf_config, "max_position_embeddings")
        partial = number(hf_config, "partial_rotary_factor", 1.0)
        in_scaling = positive_int(scaling, "original_max_position_embeddings", longest)
        return cls(
            rope_type=rope_type,
            theta=number(scaling, "rope_theta"),
            partial_rotary_factor=number(scaling, "partial_rotary_factor", partial),
            max_position_embeddings=longest,
            original_max_position_embeddings=positive_int(
                hf_config, "original_max_position_embeddings", in_scaling
            ),
            scaling=scaling,
            freq_factors=hf_config.get("rope_freq_factors"),
        )

    def number(self, key: str) -> float:
        """A number that the type cannot do without."""
        if self.scaling.get(key) is None:
            raise ConfigError(
                f"RoPE type {self.rope_type!r} needs the number {key!r}, but it is missing;"
                f" set it in the config's rope_parameters."
            )
        return number(self.scaling, key)

    def numbers(self, key: str, count: int) -> torch.Tensor:
        """A list of numbers, one per frequency, as float32 [count]."""
        return _one_per_frequency(self.scaling.get(key), key, count)


def rope_frequencies(
    config: RopeConfig, rotary_dim: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [rotary_dim / 2], and what cos and sin are multiplied by."""
    try:
        inv_freq, attention_factor = _SCALINGS[config.rope_type](config, rotary_dim, max_model_len)
    except (ArithmeticError, ValueError) as error:  # a logarithm of 0, a division by it
        raise _no_frequencies(config, str(error)) from error
    if config.freq_factors is not None:
        inv_freq = inv_freq / _one_per_frequency(
            config.freq_factors, "rope_freq_factors", rotary_dim // 2
        )
    if not (inv_freq.isfinite().all() and math.isfinite(attention_factor)):
        raise _no_frequencies(config, "a frequency is not finite")
    return inv_freq, attention_factor


def _no_frequencies(config: RopeConfig, why: str) -> ConfigError:
    settings = shown({"rope_theta": config.theta, **config.scaling})
    return ConfigError(
        f"config.json: RoPE cannot be computed from {settings}: {why}. Set rope_parameters with"
        f" hf_overrides if the file is wrong."
    )


class RotaryEmbedding(nn.Module):
    """The table of angles, by position. One object serves all layers of a model."""

    cos: torch.Tensor
    sin: torch.Tensor
    axes: torch.Tensor | None

    def __init__(self, config: RopeConfig, head_size: int, max_model_len: int) -> None:
        super().__init__()
        rotary_dim = int(head_size * config.partial_rotary_factor)
        if not 2 <= rotary_dim <= head_size or rotary_dim % 2:
            raise ConfigError(
                f"RoPE rotates pairs, but partial_rotary_factor={config.partial_rotary_factor} of"
                f" head_dim={head_size} is {rotary_dim}; it must be an even number from 2 to"
                f" head_dim."
            )
        inv_freq, attention_factor = rope_frequencies(config, rotary_dim, max_model_len)
        angles = torch.arange(max_model_len).float()[:, None] * inv_freq
        self.register_buffer("cos", angles.cos() * attention_factor, persistent=False)
        self.register_buffer("sin", angles.sin() * attention_factor, persistent=False)
        self.register_buffer("axes", _axes(config, rotary_dim // 2), persistent=False)

    def reserve(self, num_rows: int) -> int:
        """Lengthen the table by rows that `write` fills; the first of them. To be called before
        anything is recorded.
        """
        first = len(self.cos)
        for name in ("cos", "sin"):
            table: torch.Tensor = getattr(self, name)
            setattr(self, name, torch.cat((table, table.new_zeros(num_rows, table.shape[1]))))
        return first

    def write(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Let `rows` of the table, int64 [N], rotate a token at three `positions`, int64 [3, N]."""
        assert self.axes is not None
        places = positions[self.axes].t()  # [N, rotary_dim / 2]
        self.cos[rows] = self.cos.gather(0, places)
        self.sin[rows] = self.sin.gather(0, places)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at these positions, int64 [N]; attention applies it."""
        return Rotation(positions, self.cos, self.sin)


def _axes(config: RopeConfig, num_frequencies: int) -> torch.Tensor | None:
    """Which of three positions each frequency goes by, int64; None where there is one position."""
    sections = config.scaling.get("mrope_section")
    if sections is None:
        return None
    if (
        not isinstance(sections, Sequence)
        or len(sections) != 3
        or not all(isinstance(each, int) and each >= 0 for each in sections)
        or sum(sections) != num_frequencies
    ):
        raise ConfigError(
            f"RoPE: mrope_section is {shown(sections)}, but must be three counts that add up to"
            f" {num_frequencies} frequencies."
        )
    if not config.scaling.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2).float() / rotary_dim


def _one_per_frequency(values: Any, key: str, count: int) -> torch.Tensor:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or len(values) != count:
        size = len(values) if is_list else shown(values)
        raise ConfigError(
            f"RoPE: {key} must be a list of {count} numbers, one per frequency; it has: {size}."
        )
    numbers = [number({key: value}, key) for value in values]
    return torch.tensor(numbers, dtype=torch.float32)


def _default(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / config.theta ** _exponents(dim), 1.0


def _linear(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / config.theta ** _exponents(dim) / config.number("factor"), 1.0


def _dynamic(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor = config.number("factor")
    stretch = max(max_model_len / config.max_position_embeddings, 1.0)
    theta = config.theta * (factor * stretch - (factor - 1.0)) ** (dim / (dim - 2))
    return 1.0 / theta ** _exponents(dim), 1.0


def _llama3(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor, low, high = (
        config.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    inv_freq = 1.0 / config.theta ** _exponents(dim)
    turns = config.original_max_position_embeddings / (2 * math.pi / inv_freq)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor = config.number("factor")
    beta_fast = number(config.scaling, "beta_fast", 32) or 32
    beta_slow = number(config.scaling, "beta_slow", 1) or 1

    def dimension_of(turns: float) -> float:
        """Which frequency makes this many turns over the original length."""
        wavelength = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if config.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    interpolate = ((torch.arange(dim // 2).float() - low) / width).clamp(0.0, 1.0)
    frequencies = config.theta ** _exponents(dim)
    inv_freq = interpolate / (factor * frequencies) + (1.0 - interpolate) / frequencies
    return inv_freq, _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if config.scaling.get("attention_factor") is not None:
        return config.number("attention_factor")
    if config.scaling.get("mscale") and config.scaling.get("mscale_all_dim"):
        return mscale(config.number("mscale")) / mscale(config.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(config: RopeConfig, dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    original = config.original_max_position_embeddings
    divisors = config.numbers(
        "long_factor" if max_model_len > original else "short_factor", dim // 2
    )
    inv_freq = 1.0 / (divisors * config.theta ** _exponents(dim))
    if config.scaling.get("attention_factor") is not None:
        return inv_freq, config.number("attention_factor")
    if config.scaling.get("factor") is not None:
        factor = config.number("factor")
    else:
        factor = config.max_position_embeddings / original
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return inv_freq, attention_factor


_SCALINGS: dict[str, Callable[[RopeConfig, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
