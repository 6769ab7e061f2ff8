"""GELU by the normal distribution itself (Hendrycks and Gimpel, 2016), as encoders have it."""

from __future__ import annotations

import torch

_SQRT_HALF = 0.7071067811865476
_P = 0.3275911
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, formula 7.1.26, the highest power first."""


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x * normal_cdf(x) of any shape, in float32, rounded once to x's dtype.

    Absolute error below |x| * 1e-7. Spelled out with exp, + and /, as in `activation.py`: torch's
    own erf has other bits at the end of a tensor than in its middle.
    """
    values = x.float()
    z = values.abs() * _SQRT_HALF
    t = 1.0 / (z * _P + 1.0)
    polynomial = torch.full_like(t, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        polynomial = polynomial * t + coefficient
    half_tail = polynomial * t * torch.exp(-(z * z)) * 0.5
    return (values * torch.where(values < 0, half_tail, 1.0 - half_tail)).to(x.dtype)
