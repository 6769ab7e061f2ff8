"""The layers of a model that adapters can change: linear ones, as the checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.layers.linear import Linear
from tokenmill.parallel.shares import Share


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer, perhaps of several projections."""

    name: str
    """Of the module, such as `model.layers.0.self_attn.qkv_proj`."""
    linear: Linear
    modules: tuple[str, ...]
    """What the model's checkpoint calls its projections, in the order of the layer's columns."""
    row_shares: tuple[Sequence[Share], ...]
    """Of each projection's outputs, those that this rank has."""
    column_share: Share
    """Of the inputs, those that this rank has."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the layer that each projection has."""
        return tuple(sum(share.size for share in shares) for shares in self.row_shares)

    @property
    def in_features(self) -> int:
        return self.column_share.size

    @property
    def whole_widths(self) -> tuple[int, ...]:
        """Outputs of the projections."""
        return tuple(sum(share.total for share in shares) for shares in self.row_shares)

    def own_columns(self, a: torch.Tensor) -> torch.Tensor:
        """Of a matrix [any, inputs] of the projections, what this rank has."""
        share = self.column_share
        return a if share.is_whole else a[:, share.start : share.stop]

    def own_rows(self, part: int, b: torch.Tensor) -> torch.Tensor:
        """Of a matrix [outputs, any] of one projection, what this rank has."""
        shares = self.row_shares[part]
        if all(share.is_whole for share in shares):
            return b
        pieces = torch.split(b, [share.total for share in shares])
        return torch.cat([piece[s.start : s.stop] for piece, s in zip(pieces, shares, strict=True)])

    @property
    def row_order(self) -> torch.Tensor | None:
        """Of the layer's columns, where it keeps them in another order than the checkpoint."""
        order: torch.Tensor | None = getattr(self.linear, "order", None)
        return order


@dataclass(frozen=True, slots=True)
class Place:
    """A projection: a part of a site."""

    site: int
    part: int


def find_sites(model: object, target_modules: Iterable[str] = ()) -> list[Site]:
    """Every linear layer inside of the decoder's numbered layers, in their order.

    With `target_modules`, only those with a projection whose name ends in one of these.
    """
    assert isinstance(model, nn.Module)
    wanted, sites = set(target_modules), []
    for name, module in model.named_modules():
        is_in_layer = any(part.isdigit() for part in name.split(".")) and not is_of_tower(name)
        if isinstance(module, Linear) and is_in_layer:
            site = _site(name, module)
            if not wanted or any(_last(each) in wanted for each in site.modules):
                sites.append(site)
    return sites


def places(sites: Iterable[Site], target_modules: Iterable[str] = ()) -> dict[str, Place]:
    """Where each projection lies, by the checkpoint's name for it."""
    wanted = set(target_modules)
    return {
        module: Place(index, part)
        for index, site in enumerate(sites)
        for part, module in enumerate(site.modules)
        if not wanted or _last(module) in wanted
    }


def _site(name: str, linear: Linear) -> Site:
    slots = [slot for slot in linear.weight_slots(name) if slot.name.endswith(".weight")]
    return Site(
        name=name,
        linear=linear,
        modules=tuple(slot.name.removesuffix(".weight") for slot in slots),
        row_shares=tuple(linear.row_shares()),
        column_share=linear.column_share(),
    )


def _last(module: str) -> str:
    return module.rpartition(".")[2]
