"""Matrices in GGUF block types that the gguf library reads and does not write.

Every group takes the scale that its largest values ask for, and every value the nearest code. This
is enough to compare kernels on blocks that occur; a converter that cares searches for better
scales. The layouts are those of ggml's `block_*` structures, in the order of their fields.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SUPER_BLOCK = 256
CODES_OF_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def quantize(values: Floats, block_type: str) -> Bytes:
    """[rows, bytes of a row] from float32 [rows, columns], a multiple of the block's values."""
    if block_type not in _WRITERS:
        kind = gguf.GGMLQuantizationType[block_type]
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    num_values, write = _WRITERS[block_type]
    blocks = np.ascontiguousarray(values).reshape(-1, num_values)
    parts = [write(blocks[at : at + 65_536]) for at in range(0, len(blocks), 65_536)]
    return np.concatenate(parts).reshape(len(values), -1)


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """Half precision: its bytes [n, 2], and what they are read as [n, 1]."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(-1, 2), halves.astype(np.float32).reshape(-1, 1)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where the denominator is."""
    zeros = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape), np.float32)
    return np.divide(numerator, denominator, out=zeros, where=denominator != 0)


def _scales_and_minima(
    blocks: Floats, group: int, most_code: int, most_scale: int
) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """For `scale * code - minimum`: d, dmin (bytes), scales, minima [n, groups], codes [n, 256]."""
    groups = blocks.reshape(len(blocks), -1, group)
    minima = np.maximum(-groups.min(-1), 0)
    steps = np.maximum(groups.max(-1) + minima, 0) / most_code
    d_bytes, d = _half(steps.max(-1) / most_scale)
    dmin_bytes, dmin = _half(minima.max(-1) / most_scale)
    scales = np.clip(np.rint(_ratio(steps, d)), 0, most_scale)
    mins = np.clip(np.rint(_ratio(minima, dmin)), 0, most_scale)
    codes = _ratio(groups + (dmin * mins)[..., None], (d * scales)[..., None])
    codes = np.clip(np.rint(codes), 0, most_code).astype(np.uint8).reshape(len(blocks), -1)
    return d_bytes, dmin_bytes, scales.astype(np.uint8), mins.astype(np.uint8), codes


def _signed(
    blocks: Floats, group: int, most_code: int, most_scale: int
) -> tuple[Bytes, npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """For `scale * code`, codes from -most_code - 1 on: d, scales [n, groups], codes [n, 256]."""
    groups = blocks.reshape(len(blocks), -1, group)
    steps = np.abs(groups).max(-1) / most_code
    d_bytes, d = _half(steps.max(-1) / most_scale)
    scales = np.clip(np.rint(_ratio(steps, d)), 0, most_scale)
    codes = np.rint(_ratio(groups, (d * scales)[..., None]))
    codes = np.clip(codes, -most_code - 1, most_code).astype(np.int8).reshape(len(blocks), -1)
    return d_bytes, scales.astype(np.int8), codes


def _pairs_of_six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Eight scales and eight minima of six bits in twelve bytes."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    high = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.concatenate([low, high, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def _two_bits(codes: Bytes) -> Bytes:
    """Codes 0 to 3 of 256 values in 64 bytes: a byte holds four values, 32 apart."""
    quarters = codes.reshape(-1, 2, 4, 32)
    packed = np.zeros((len(quarters), 2, 32), np.uint8)
    for j in range(4):
        packed |= quarters[:, :, j] << 2 * j
    return packed.reshape(-1, 64)


def _nibbles(codes: Bytes, group: int) -> Bytes:
    """Codes 0 to 15: a byte holds a value of a group's first half and one of its second."""
    halves = codes.reshape(len(codes), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)


def _q2_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _scales_and_minima(blocks, 16, 3, 15)
    return np.concatenate([scales | minima << 4, _two_bits(codes), d, dmin], 1)


def _q3_k(blocks: Floats) -> Bytes:
    d, scales, signed = _signed(blocks, 16, 3, 31)
    codes = (signed + 4).astype(np.uint8)
    masks = np.zeros((len(blocks), 32), np.uint8)
    for bit, third in enumerate((codes >> 2).reshape(-1, 8, 32).swapaxes(0, 1)):
        masks |= third << bit
    biased = (scales + 32).astype(np.uint8)
    low = (biased[:, :8] & 15) | (biased[:, 8:] & 15) << 4
    high = np.zeros((len(blocks), 4), np.uint8)
    for j in range(4):
        high |= (biased[:, 4 * j : 4 * j + 4] >> 4) << 2 * j
    return np.concatenate([masks, _two_bits(codes & 3), low, high, d], 1)


def _q4_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _scales_and_minima(blocks, 32, 15, 63)
    return np.concatenate([d, dmin, _pairs_of_six_bits(scales, minima), _nibbles(codes, 64)], 1)


def _q5_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _scales_and_minima(blocks, 32, 31, 63)
    fifths = np.zeros((len(blocks), 32), np.uint8)
    for bit, fifth in enumerate((codes >> 4).reshape(-1, 8, 32).swapaxes(0, 1)):
        fifths |= fifth << bit
    low = _nibbles(codes & 15, 64)
    return np.concatenate([d, dmin, _pairs_of_six_bits(scales, minima), fifths, low], 1)


def _q6_k(blocks: Floats) -> Bytes:
    d, scales, signed = _signed(blocks, 16, 31, 127)
    codes = (signed + 32).astype(np.uint8)
    low = (codes & 15).reshape(-1, 2, 2, 64)  # of each half, two runs of 64 values
    high = _two_bits(codes >> 4)
    nibbles = (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([nibbles, high, scales.view(np.uint8), d], 1)


def _nearest(values: Floats) -> Bytes:
    """Indices of the nearest values of the table of IQ4."""
    between = (CODES_OF_IQ4[1:] + CODES_OF_IQ4[:-1]) / 2
    return np.searchsorted(between, values).astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    d_bytes, d = _half(np.abs(blocks).max(-1) / 127)
    return np.concatenate([d_bytes, _nibbles(_nearest(_ratio(blocks, d)), 32)], 1)


def _iq4_xs(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 8, 32)
    steps = np.abs(groups).max(-1) / 127
    d_bytes, d = _half(steps.max(-1) / 31)
    scales = np.clip(np.rint(_ratio(steps, d)), 0, 31)
    codes = _nearest(_ratio(groups, (d * scales)[..., None])).reshape(len(blocks), -1)
    biased = (scales + 32).astype(np.uint16)
    high = sum((biased[:, j] >> 4) << 2 * j for j in range(8)).astype("<u2").view(np.uint8)
    low = (biased[:, 0::2] & 15 | (biased[:, 1::2] & 15) << 4).astype(np.uint8)
    return np.concatenate([d_bytes, high.reshape(-1, 2), low, _nibbles(codes, 32)], 1)


_WRITERS: dict[str, tuple[int, Callable[[Floats], Bytes]]] = {
    "Q2_K": (SUPER_BLOCK, _q2_k),
    "Q3_K": (SUPER_BLOCK, _q3_k),
    "Q4_K": (SUPER_BLOCK, _q4_k),
    "Q5_K": (SUPER_BLOCK, _q5_k),
    "Q6_K": (SUPER_BLOCK, _q6_k),
    "IQ4_NL": (32, _iq4_nl),
    "IQ4_XS": (SUPER_BLOCK, _iq4_xs),
}
