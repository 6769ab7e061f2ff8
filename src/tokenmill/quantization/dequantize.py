"""Stored tensors -> plain ones.

A row of a quantised tensor is a run of blocks; a block holds 32 or 256 values as small integer
codes, and scales to multiply them with. Each function below turns blocks into float32 values:

    uint8 [num_blocks, block_bytes] -> float32 [num_blocks, block_size]

in the order of operations of the reference, so that the values are the same to the bit. Layouts
are drawn in bytes; `d`, `m` and the like are float16. Source: ggml's block formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor
from tokenmill.errors import CheckpointError
from tokenmill.quantization.packed_blocks import unpack

_SLAB_VALUES = (1 << 15) - 256
"""Values worked on at a time.

A slab's temporaries stay in the caches, and it is just below the size from which torch forks and
joins its threads for every operation: that gains little here, and on busy cores each join waits for
a thread that is not running.
"""


def dequantize(raw: RawTensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of `raw` in `dtype`, shape `raw.shape`, rows in Hugging Face's order.

    Each value is the float32 value of the format, rounded once. A plain tensor that needs no
    conversion is returned as a view of the mapped file. Runs on the calling thread, which leaves
    the interpreter to others most of the time. Raises `CheckpointError` if the format is not
    supported.
    """
    raw.need()
    if raw.format in _PLAIN:
        values = rows_in_order(raw).view(_PLAIN[raw.format]).view(raw.shape)
        return (values - raw.value_offset if raw.value_offset else values).to(dtype)
    assert not raw.value_offset
    if raw.format.startswith(PACKED_PREFIX):
        return unpack(raw.format.removeprefix(PACKED_PREFIX), raw.data, raw.shape).to(dtype)
    layout = _BLOCKS.get(raw.format)
    if layout is None:
        raise CheckpointError(
            f"The tensor format {raw.format} is not supported. Supported:"
            f" {', '.join([*_PLAIN, *_BLOCKS])}. Take a file in one of these, such as Q4_K_M."
        )
    blocks = rows_in_order(raw).view(-1, layout.block_bytes)
    values = torch.empty(len(blocks), layout.block_size, dtype=dtype)
    slab = _SLAB_VALUES // layout.block_size
    for start in range(0, len(blocks), slab):
        end = start + slab
        values[start:end] = layout.dequantize(blocks[start:end])
    return values.view(raw.shape)


def plain_values(raw: RawTensor) -> torch.Tensor:
    """The values of `raw`, without rounding: in their own type, if that is a plain one."""
    dtype = torch.float32 if raw.value_offset else _PLAIN.get(raw.format, torch.float32)
    return dequantize(raw, dtype)


def rows_in_order(raw: RawTensor) -> torch.Tensor:
    """The bytes of `raw`, uint8 [num_bytes], with llama.cpp's interleaving of q and k rows undone.

    Within a head of n rows, llama.cpp stores 0, n/2, 1, n/2 + 1, ...; the order wanted is 0, 1, ...
    Without interleaving, the result is `raw.data` itself.
    """
    if raw.head_permutation is None:
        return raw.data
    num_rows = raw.shape[0]
    pairs = raw.head_permutation * 2
    if num_rows % pairs:
        raise CheckpointError(
            f"A tensor of {num_rows} rows cannot be put in order for {raw.head_permutation} heads;"
            f" the rows must be a multiple of {pairs}."
        )
    interleaved = raw.data.view(raw.head_permutation, num_rows // pairs, 2, -1)
    return interleaved.transpose(1, 2).reshape(-1)


def block_half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The float16 at byte `offset` of each block, as float32 [num_blocks, 1]."""
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def block_codes(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Four-bit codes of a block of 32, from byte `start`: uint8 [num_blocks, 32].

    Low halves of the bytes are values 0..15, high halves 16..31. Whole blocks are split before the
    slice is taken, because torch is slow on short rows with gaps between them.
    """
    low, high = blocks & 15, blocks >> 4
    return torch.cat((low[:, start : start + 16], high[:, start : start + 16]), dim=1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The bits of four bytes from byte `start`, worth 16 each: uint8 [num_blocks, 32]."""
    bit = torch.arange(8, dtype=torch.uint8)
    return (blocks[:, start : start + 4, None] >> bit & 1).view(-1, 32) << 4


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | codes int8 32 |; value = code * d."""
    return blocks[:, 2:].view(torch.int8).float().mul_(block_half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | codes 16 |; value = (code - 8) * d."""
    return block_codes(blocks, 2).float().sub_(8.0).mul_(block_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | m 2 | codes 16 |; value = code * d + m."""
    return block_codes(blocks, 4).float().mul_(block_half(blocks, 0)).add_(block_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | fifth bits 4 | codes 16 |; value = (code - 16) * d."""
    codes = block_codes(blocks, 6) | _fifth_bits(blocks, 2)
    return codes.float().sub_(16.0).mul_(block_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | m 2 | fifth bits 4 | codes 16 |; value = code * d + m."""
    codes = block_codes(blocks, 8) | _fifth_bits(blocks, 4)
    return codes.float().mul_(block_half(blocks, 0)).add_(block_half(blocks, 2))


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2n]: the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | dmin 2 | scales 12 | codes 128 |; see `k_scales`."""
    codes = nibbles(blocks[:, 16:].view(-1, 4, 32))
    return _k_values(blocks, codes)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | dmin 2 | scales 12 | fifth bits 32 | codes 128 |.

    Bit g of fifth-bits byte i belongs to value i of group g.
    """
    group = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> group & 1
    codes = nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth << 4
    return _k_values(blocks, codes)


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) of the groups of Q4_K or Q5_K blocks, float32 [num_blocks, 8] each.

    Eight groups of 32 codes have a six-bit scale and a six-bit minimum each:

        value = (d * scale) * code - (dmin * minimum)

    The twelve bytes of scales, for groups 0..3 and 4..7:

        bytes 0..3    scale[0..3] in bits 0..5, upper two bits of scale[4..7] in bits 6..7
        bytes 4..7    the same for minimum
        bytes 8..11   lower four bits of scale[4..7], then of minimum[4..7]
    """
    packed = blocks[:, 4:16]
    low, high = packed[:, :8] & 63, packed[:, :8] >> 6 << 4
    last = nibbles(packed[:, 8:])
    scale = torch.cat((low[:, :4], high[:, :4] | last[:, :4]), dim=1)
    minimum = torch.cat((low[:, 4:], high[:, 4:] | last[:, 4:]), dim=1)
    return block_half(blocks, 0) * scale.float(), block_half(blocks, 2) * minimum.float()


def _k_values(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What codes, [num_blocks, 256] values in any shape, stand for; see `k_scales`."""
    factor, offset = (part[:, :, None] for part in k_scales(blocks))
    return codes.view(-1, 8, 32).float().mul_(factor).sub_(offset).view(-1, 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """| low four bits 128 | high two bits 64 | scales int8 16 | d 2 |.

    value = (d * scale) * (code - 32), a scale for 16 values. Each half of the block holds four runs
    of 32 values: 64 bytes of low bits (runs 0 and 1 in the low halves, 2 and 3 in the high ones),
    and 32 bytes of high bits with two bits for each run.
    """
    low = nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    run = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> run & 3
    codes = (low | high << 4).view(-1, 16, 16).float().sub_(32.0)
    scale = blocks[:, 192:208].view(torch.int8).float()
    return codes.mul_((block_half(blocks, 208) * scale)[:, :, None]).view(-1, 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """| third bits 32 | low two bits 64 | scales 12 | d 2 |.

    value = (d * (scale - 32)) * (code - 4), a scale for 16 values. Runs of 32 values as in Q2_K;
    bit r of third-bits byte i belongs to value i of run r. Scale i has its low four bits in byte
    i % 8 of the scales (i < 8: low half), bits 4 and 5 in byte 8 + i % 4, from bit i // 4 * 2 on.
    """
    third = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = (_two_bits(blocks[:, 32:96]) | third << 2).view(-1, 16, 16).float().sub_(4.0)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, None, 104:108] >> shift & 3).view(-1, 16)
    scale = (nibbles(blocks[:, 96:104]) | high << 4).float().sub_(32.0)
    return codes.mul_((block_half(blocks, 108) * scale)[:, :, None]).view(-1, 256)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """| scales 16 | codes 64 | d 2 | dmin 2 |.

    value = (d * scale) * code - (dmin * minimum); the low half of a scales byte is the scale of 16
    values, the high half their minimum.
    """
    codes = _two_bits(blocks[:, 16:80]).view(-1, 16, 16).float()
    factor = block_half(blocks, 80) * (blocks[:, :16] & 15).float()
    offset = block_half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return codes.mul_(factor[:, :, None]).sub_(offset[:, :, None]).view(-1, 256)


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [num_blocks, 64] -> [num_blocks, 8, 32]: a half of the bytes holds four runs of 32."""
    shift = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (packed.view(-1, 2, 1, 32) >> shift & 3).view(-1, 8, 32)


_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
"""Twice the values of e2m1 floats."""


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | codes 16 |; value = table[code] * d."""
    return _IQ4[block_codes(blocks, 2).int()].mul_(block_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """| d 2 | high scale bits 2 | low scale bits 4 | codes 128 |.

    value = table[code] * (d * (scale - 32)), a six-bit scale for 32 values.
    """
    codes = nibbles(blocks[:, 8:].view(-1, 8, 16)).int()
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (blocks[:, 2:4, None] >> shift & 3).view(-1, 8)
    factor = block_half(blocks, 0) * (low | high << 4).float().sub_(32.0)
    return _IQ4[codes].mul_(factor[:, :, None]).view(-1, 256)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """| e 1 | codes 16 |; value = e2m1 float of code * 2^(e - 127)."""
    exponent = blocks[:, :1].int() - 128
    return torch.ldexp(_FP4[block_codes(blocks, 1).int()], exponent)


class _BlockLayout(NamedTuple):
    block_size: int
    """Values in a block."""
    block_bytes: int
    dequantize: Callable[[torch.Tensor], torch.Tensor]


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BLOCKS = {
    "Q8_0": _BlockLayout(32, 34, _q8_0),
    "Q4_0": _BlockLayout(32, 18, _q4_0),
    "Q4_1": _BlockLayout(32, 20, _q4_1),
    "Q5_0": _BlockLayout(32, 22, _q5_0),
    "Q5_1": _BlockLayout(32, 24, _q5_1),
    "Q4_K": _BlockLayout(256, 144, _q4_k),
    "Q5_K": _BlockLayout(256, 176, _q5_k),
    "Q6_K": _BlockLayout(256, 210, _q6_k),
    "Q3_K": _BlockLayout(256, 110, _q3_k),
    "Q2_K": _BlockLayout(256, 84, _q2_k),
    "IQ4_NL": _BlockLayout(32, 18, _iq4_nl),
    "IQ4_XS": _BlockLayout(256, 136, _iq4_xs),
    "MXFP4": _BlockLayout(32, 17, _mxfp4),
}
