"""What packing rounds of each GGUF type: a table for docs/formats.md.

    python benchmarks/formats.py

Blocks are random: all codes and small scales are as likely, and super-block scales are spread over
two decades. `error` is the root mean square of packed minus stored values over that of the stored
ones; `own error` is the same of what the format itself rounds, a step over the root of 12;
`worst` is the largest error over the largest value of its 32.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch

from tokenmill.kernels import gemm

ROWS, COLUMNS = 256, 4096
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block's float16 numbers lie; at its start unless named here."""
GROUPS = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16)
"""Values that share a scale in the file, if not 32."""
UNEVEN = ("IQ4_NL", "IQ4_XS", "MXFP4")
"""Types whose codes are not evenly spaced: they have no single step."""


def stored(block_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and their values [ROWS, COLUMNS]."""
    kind = gguf.GGMLQuantizationType[block_type]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(6)
    raw = rng.integers(0, 256, (ROWS, COLUMNS // num_values, num_bytes), dtype=np.uint8)
    for offset in HALVES.get(block_type, (0,)):
        halves = 10.0 ** rng.uniform(-4.5, -2.5, (*raw.shape[:2], 1))
        raw[:, :, offset : offset + 2] = halves.astype(np.float16).view(np.uint8)
    if block_type == "MXFP4":
        raw[:, :, 0] = rng.integers(112, 124, raw.shape[:2])
    values = gguf.dequantize(raw.reshape(ROWS, -1), kind)
    return torch.from_numpy(raw.reshape(-1)), torch.from_numpy(values)


def steps(block_type: str, values: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring values in each group: the smallest one that occurs."""
    in_order = values.double().view(-1, GROUPS.get(block_type, 32)).sort(-1).values
    gaps = in_order.diff(dim=-1)
    tiny = 1e-3 * (in_order[:, -1:] - in_order[:, :1])
    return torch.where(gaps > tiny, gaps, torch.inf).amin(-1)


def row(block_type: str) -> list[str]:
    """The type's line of the table."""
    raw, values = stored(block_type)
    packed = gemm.PackedBlocks.pack(block_type, raw, ROWS, COLUMNS)
    errors = (packed.unpack_rows(torch.arange(ROWS)) - values).double()
    size = values.double().square().mean().sqrt()
    own = "-"
    if block_type not in UNEVEN:
        step = steps(block_type, values)
        own = f"{float((step[step.isfinite()].square().mean() / 12).sqrt() / size):.2%}"
    largest = values.view(-1, 32).abs().amax(-1)
    worst = (errors.view(-1, 32).abs().amax(-1) / largest)[largest > 0].max()
    error = float(errors.square().mean().sqrt() / size)
    per_value = 8 / (ROWS * COLUMNS)
    return [
        block_type,
        f"{len(raw) * per_value:.2f}",
        f"{packed.buffer.nbytes * per_value:.2f}",
        f"{error:.4%}" if error else "none",
        f"{float(worst):.3%}" if error else "none",
        own,
    ]


def main() -> None:
    heading = ["type", "bits in the file", "bits in memory", "error", "worst", "own error"]
    for line in [heading, ["---"] * len(heading), *map(row, gemm.BLOCK_TYPES)]:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
