"""Four-bit weights: codes of 0 to 15, with a scale and a minimum for a group of values of a row.

    value = code * scale + minimum      rounded once, to bfloat16

which is what GGUF's Q4_0 (minimum = -8 * scale), Q4_1 and Q4_K hold, and AWQ and GPTQ, too
(minimum = -zero * scale). The matrix lies as its kernel reads it:

    codes    uint8 [N, K / 2]    byte i of a unit of 2 * half values holds value i in its low half,
                                 value half + i in its high half; half is the group, 64 at most
    scales   int32 [K / group, N]    bfloat16 scale in the low half, bfloat16 minimum in the high

so that a row's two halves of bytes are neighbouring columns without being shuffled, and the scales
of a tile are neighbours in memory. K is padded to a multiple of 128; the padding is not multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

GROUP_SIZES = (32, 64, 128)
DEPTH_MULTIPLE = 128
"""K is padded to a multiple; a step of the kernel takes as many values."""
_LARGEST_CODE = 15


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight [N, K] in four bits a value and a scale and minimum for `group_size` values."""

    codes: torch.Tensor
    """uint8 [N, padded K / 2]."""
    scales: torch.Tensor
    """int32 [padded K / group_size, N]."""
    group_size: int
    in_features: int
    """K, before padding."""

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, group_size: int, device: torch.device | str
    ) -> PackedInt4:
        """Room for a weight; parts of its rows are filled with `pack_rows`."""
        assert group_size in GROUP_SIZES
        depth = padded_depth(in_features)
        codes = torch.empty(out_features, depth // 2, dtype=torch.uint8, device=device)
        shape = (depth // group_size, out_features)
        scales = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(codes, scales, group_size, in_features)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    def pack_rows(
        self, rows: slice, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
    ) -> None:
        """Fill `rows` from codes, uint8 [num_rows, K], and float scale and minimum, [num_rows,
        K / group_size rounded up], on any device.
        """
        self.codes[rows] = pack_codes(codes, self.group_size).to(self.codes.device)
        packed = pack_scales(scale, minimum)
        packed = functional.pad(packed, (0, len(self.scales) - packed.shape[1]))
        self.scales[:, rows] = packed.t().to(self.scales.device)

    def unpack_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids, int32 or int64 [num_ids], as bfloat16 [num_ids, K]."""
        values = unpack_codes(self.codes[ids], self.group_size)
        scale, minimum = unpack_scales(self.scales[:, ids].t())
        repeated = [s.repeat_interleave(self.group_size, dim=1) for s in (scale, minimum)]
        weight = values.float() * repeated[0] + repeated[1]
        return weight.to(torch.bfloat16)[:, : self.in_features]


def pack_codes(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """Codes, uint8 [N, K], two a byte, as the kernel reads them: [N, padded K / 2]."""
    padded = functional.pad(codes, (0, padded_depth(codes.shape[1]) - codes.shape[1]))
    low, high = padded.unflatten(1, (-1, 2, half_unit(group_size))).unbind(2)
    packed: torch.Tensor = low | high << 4
    return packed.flatten(1)


def unpack_codes(packed: torch.Tensor, group_size: int) -> torch.Tensor:
    """What `pack_codes` packed, uint8 [N, padded K]."""
    half = half_unit(group_size)
    low_and_high = [part.unflatten(1, (-1, half)) for part in (packed & 15, packed >> 4)]
    return torch.stack(low_and_high, dim=2).flatten(1)


def pack_int4(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, group_size: int
) -> PackedInt4:
    """Pack codes, uint8 [N, K], and float scale and minimum, each [N, K / group_size rounded up].

    Scale and minimum are rounded to bfloat16.
    """
    packed = PackedInt4.empty(codes.shape[0], codes.shape[1], group_size, codes.device)
    packed.pack_rows(slice(0, len(codes)), codes, scale, minimum)
    return packed


def quantize_weight_int4(weight: torch.Tensor, group_size: int) -> PackedInt4:
    """Pack a weight [N, K] of any float type; each value to the nearest code of its group."""
    return pack_int4(*int4_codes(weight, group_size), group_size)


def int4_codes(
    weight: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, minimum) of a weight [N, K], as `pack_int4` takes them.

    A group's smallest value becomes code 0, its largest 15. Codes are chosen for scale and minimum
    as they are after rounding.
    """
    depth = weight.shape[1]
    padding = -depth % group_size
    # Repeated values widen no group's range.
    padded = functional.pad(weight.float(), (0, padding), mode="replicate") if padding else weight
    groups = padded.float().unflatten(1, (-1, group_size))
    least, most = groups.aminmax(dim=-1)
    scale = ((most - least) / _LARGEST_CODE).to(torch.bfloat16).float()
    minimum = least.to(torch.bfloat16).float()
    steps = (groups - minimum[..., None]) / scale.clamp(min=1e-30)[..., None]
    codes = steps.round().clamp(0, _LARGEST_CODE).to(torch.uint8)
    return codes.flatten(1)[:, :depth], scale, minimum


def pack_scales(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Both of one shape to int32 of that shape: bfloat16 scale below, bfloat16 minimum above."""
    pair = torch.stack((scale, minimum), dim=-1).to(torch.bfloat16)
    return pair.view(torch.int32).squeeze(-1)


def unpack_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) float32, each of the shape of `packed`."""
    pair = packed.contiguous().unsqueeze(-1).view(torch.bfloat16).float()
    return pair[..., 0], pair[..., 1]


def padded_depth(in_features: int) -> int:
    """K as it is stored."""
    return -(-in_features // DEPTH_MULTIPLE) * DEPTH_MULTIPLE


def half_unit(group_size: int) -> int:
    """Values in the low halves of a unit's bytes. They have one scale, as the high ones."""
    return min(group_size, DEPTH_MULTIPLE // 2)
