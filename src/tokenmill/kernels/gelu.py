"""GELU by the normal distribution itself (Hendrycks and Gimpel, 2016), as encoders have it."""

from __future__ import annotations

import torch

_SQRT_HALF = 0.7071067811865476
_P = 0.3275911
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, formula 7.1.26, the highest power first."""


_SLAB_VALUES = 1 << 16
"""Computed at a time, so that what one operation writes is in the cache for the next."""


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x * normal_cdf(x) of any shape, in float32, rounded once to x's dtype.

    Absolute error below |x| * 1e-7. Spelled out with exp, + and /, as in `activation.py`: torch's
    own erf has other bits at the end of a tensor than in its middle.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    values, results = x.reshape(-1), out.view(-1)
    for start in range(0, len(values), _SLAB_VALUES):
        slab = slice(start, start + _SLAB_VALUES)
        results[slab] = _gelu(values[slab].float())
    return out


def _gelu(values: torch.Tensor) -> torch.Tensor:
    size = values.abs()
    z = size * _SQRT_HALF
    t = (z * _P).add_(1.0).reciprocal_()
    polynomial = (t * _COEFFICIENTS[0]).add_(_COEFFICIENTS[1])
    for coefficient in _COEFFICIENTS[2:]:
        polynomial.mul_(t).add_(coefficient)
    half_tail = polynomial.mul_(t).mul_(torch.exp(z.square_().neg_())).mul_(0.5)
    # x * cdf(x) is x / 2 + |x| * (1 / 2 - tail of |x|) on both sides of 0.
    return half_tail.neg_().add_(0.5).mul_(size).add_(values * 0.5)
