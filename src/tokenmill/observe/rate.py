"""How much in how long, in words."""

from __future__ import annotations


def rate(num_bytes: int, seconds: float) -> str:
    """`2.47 GB in 1.52 s (1.63 GB/s)`; small amounts in MB."""
    per_second = num_bytes / max(seconds, 1e-9)
    return f"{_amount(num_bytes)} in {seconds:.2f} s ({_amount(per_second)}/s)"


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
