"""Matrices of other tools' checkpoints -> bytes of GGUF blocks.

Every layout becomes codes [N, K] (int32, counted from zero up), a scale and a zero for each group
of a row: value = (code - zero) * scale. What fits blocks of 32 keeps its codes; the rest is
rounded to eight bits, from its own values. Sources: the formats' own descriptions (AutoGPTQ,
AutoAWQ, compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenmill.checkpoint.quantized_directory import BLOCK_VALUES, Packed, Scheme
from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight neighbours, that the i-th four bits of a word hold."""


def to_blocks(
    packed: Packed, tensors: Mapping[str, torch.Tensor], scheme: Scheme, where: str
) -> torch.Tensor:
    """Bytes, uint8 [num_bytes], of the matrix in `packed.block_type`.

    `where` begins the message of the `CheckpointError` for tensors that contradict the config.
    """
    if packed.kind == "float8":
        return _in_eight_bits(_float8_values(packed, tensors, scheme), packed)
    codes, scale, zero, group = _parts(packed, tensors, scheme)
    if packed.block_type in ("Q4_0", "Q4_1"):
        _check_order(group, packed.shape[1], scale.shape[1], where)
        return _four_bits(codes, scale, zero, packed, where)
    is_centred = scheme.bits == 8 and bool((zero == 128).all())
    in_blocks = packed.shape[1] // scale.shape[1] % BLOCK_VALUES == 0
    if is_centred and in_blocks and _is_in_order(group, scale.shape[1]):
        return _eight_bits(codes - 128, _per_block(scale, packed.shape[1]))
    return _in_eight_bits((codes - zero[:, group]).float() * scale[:, group], packed)


def _parts(
    packed: Packed, tensors: Mapping[str, torch.Tensor], scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int32 [N, K]; scale float32 and zero int32 [N, groups]; group int64 [K]."""
    import torch

    rows, columns = packed.shape
    middle = 1 << (scheme.bits - 1)
    if packed.kind == "int8":
        codes = tensors["weight"].int() + 128
        scale = tensors["weight_scale"].float().reshape(-1, 1)
        if tensors["weight_scale"].ndim == 2:
            scale = tensors["weight_scale"].float()
        scale = scale.expand(rows, -1)
        zero = torch.full(scale.shape, 128, dtype=torch.int32)
        if "weight_zero_point" in tensors:
            zero += tensors["weight_zero_point"].int().reshape(-1, zero.shape[1])
    elif packed.kind == "packed":
        codes = _unpack(tensors["weight_packed"], scheme.bits)[:, :columns]
        scale = tensors["weight_scale"].float().reshape(rows, -1)
        zero = torch.full(scale.shape, middle, dtype=torch.int32)
        if "weight_zero_point" in tensors:
            zero = _unpack(tensors["weight_zero_point"].t(), scheme.bits).t()[:rows]
    elif packed.kind == "gptq":
        codes = _unpack(tensors["qweight"].t(), scheme.bits)
        scale = tensors["scales"].float().t()
        zero = _unpack(tensors["qzeros"], scheme.bits)[:, :rows].t() + scheme.zero_offset
    else:
        codes = _unpack_awq(tensors["qweight"]).t()
        scale = tensors["scales"].float().t()
        zero = torch.full(scale.shape, middle, dtype=torch.int32)
        if "qzeros" in tensors:
            zero = _unpack_awq(tensors["qzeros"]).t()
    group = torch.arange(columns) // (columns // scale.shape[1])
    order = tensors.get("g_idx", tensors.get("weight_g_idx"))
    if order is not None and scale.shape[1] > 1 and bool((order >= 0).all()):
        group = order.long()
    return codes.contiguous(), scale.contiguous(), zero.contiguous(), group


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> codes int32 [n, m * 32 / bits], the lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = words[:, :, None] >> shifts & (1 << bits) - 1
    return codes.reshape(words.shape[0], -1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> codes int32 [n, 8 * m]."""
    import torch

    in_words = _unpack(words, 4).view(words.shape[0], -1, 8)
    codes = torch.empty_like(in_words)
    codes[:, :, list(_AWQ_COLUMNS)] = in_words
    return codes.view(words.shape[0], -1)


def _is_in_order(group: torch.Tensor, num_groups: int) -> bool:
    import torch

    return torch.equal(group, torch.arange(len(group)) // (len(group) // num_groups))


def _check_order(group: torch.Tensor, columns: int, num_groups: int, where: str) -> None:
    if columns % num_groups or not _is_in_order(group, num_groups):
        raise CheckpointError(
            f"{where}: the values of its groups lie apart (g_idx), though the config has"
            f" desc_act=false. Set desc_act to true in quantization_config."
        )


def _per_block(parts: torch.Tensor, columns: int) -> torch.Tensor:
    """A part of each group, [N, groups], for each block: [N, K / 32]."""
    return parts.repeat_interleave(columns // BLOCK_VALUES // parts.shape[1], dim=1)


def _four_bits(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, packed: Packed, where: str
) -> torch.Tensor:
    import torch

    columns = packed.shape[1]
    halves = [_half_bytes(_per_block(scale, columns))]
    if packed.block_type == "Q4_1":
        halves.append(_half_bytes(_per_block(-zero.float() * scale, columns)))
    elif bool((zero != 8).any()):
        raise CheckpointError(
            f"{where}: has zeros other than 8, though the config says that it is symmetric."
        )
    in_blocks = codes.view(packed.shape[0], -1, 2, BLOCK_VALUES // 2).to(torch.uint8)
    nibbles = in_blocks[:, :, 0] | in_blocks[:, :, 1] << 4
    return torch.cat([*halves, nibbles], dim=-1).view(-1)


def _eight_bits(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Q8_0 of codes [N, K], -128 to 127, and scale [N, K / 32]."""
    import torch

    as_bytes = codes.to(torch.int8).view(torch.uint8).view(codes.shape[0], -1, BLOCK_VALUES)
    return torch.cat((_half_bytes(scale), as_bytes), dim=-1).view(-1)


def _in_eight_bits(values: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Values, float32 [N, K], rounded to Q8_0: the largest of 32 becomes code 127."""
    import torch

    if packed.block_type == "F32":
        return values.contiguous().view(-1).view(torch.uint8)
    blocks = values.view(values.shape[0], -1, BLOCK_VALUES)
    scale = (blocks.abs().amax(-1) / 127).half().float()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = (blocks * inverse[:, :, None]).round().clamp(-127, 127)
    return _eight_bits(codes.view(values.shape), scale)


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """float32 [N, n] -> the bytes of halves, uint8 [N, n, 2]."""
    import torch

    return values.half().contiguous().view(torch.uint8).view(*values.shape, 2)


def _float8_values(
    packed: Packed, tensors: Mapping[str, torch.Tensor], scheme: Scheme
) -> torch.Tensor:
    values = tensors["weight"].float()
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    if scale is None:
        return values
    scale = scale.float()
    rows, columns = packed.shape
    if scale.numel() == 1:
        return values * scale.reshape(1, 1)
    if scale.numel() == rows:
        return values * scale.reshape(rows, 1)
    by_row = scale.repeat_interleave(scheme.block_shape[0], dim=0)[:rows]
    return values * by_row.repeat_interleave(scheme.block_shape[1], dim=1)[:, :columns]
