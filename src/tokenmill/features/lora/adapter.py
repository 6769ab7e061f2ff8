"""An adapter's tensors, checked against a model before anything of it is taken in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tokenmill.checkpoint.nested_config import canonical_name
from tokenmill.config.engine_config import LoRAConfig
from tokenmill.errors import AdapterError, did_you_mean
from tokenmill.features.lora.peft import AdapterSettings, read_settings, weights_file
from tokenmill.features.lora.sites import Place, Site
from tokenmill.kernels.lora import LowRank

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_MOST_LISTED = 6
_READ = (torch.float32, torch.float16, torch.bfloat16)
_PREFIXES = ("", "model.", "transformer.")
"""What a name may lack that was saved from another wrapping of the model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Matrices for some layers of a model."""

    load_id: str
    """Hex SHA-256 of its content."""
    changes: Mapping[int, Sequence[LowRank | None]]
    """By index of the site here: an entry for each of its projections."""
    rank: int
    """The largest one."""
    num_modules: int
    """Projections that it changes, in all stages of a pipeline."""


@dataclass(slots=True)
class _Pair:
    """The matrices of one module, as they are found."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None


@dataclass(slots=True)
class _Faults:
    """What is wrong, by kind."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, what: str) -> None:
        self.kinds.setdefault(kind, []).append(what)

    def raise_if_any(self, directory: Path) -> None:
        if self.kinds:
            raise AdapterError(
                f"The adapter {directory} does not fit the model. "
                + ". ".join(
                    f"{len(found)} {kind}: {_listed(found)}" for kind, found in self.kinds.items()
                )
                + "."
            )


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(
        self,
        config: LoRAConfig,
        sites: Sequence[Site],
        places: Mapping[str, Place],
        own: Mapping[int, int] | None = None,
    ) -> None:
        """`sites` are those of the whole model. `own` says of those that are here, which they are;
        by default all are.
        """
        self._config = config
        self._sites = sites
        self._places = places
        self._own = {index: index for index in range(len(sites))} if own is None else own
        values = sum(
            len(site.modules) * site.column_share.total + sum(site.whole_widths) for site in sites
        )
        self._most_bytes = 4 * config.max_lora_rank * values + (16 << 20)
        """Of a file: float32, and a header."""

    def read(self, directory: Path) -> Adapter:
        """The adapter, or `AdapterError` that says all that is wrong with it."""
        settings = read_settings(directory)
        if settings.largest_rank > self._config.max_lora_rank:
            raise AdapterError(
                f"The adapter {directory} has rank {settings.largest_rank}, more than"
                f" max_lora_rank={self._config.max_lora_rank}; start the engine with a larger one."
            )
        data = self._read_file(weights_file(directory))
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise AdapterError(f"{weights_file(directory)} is damaged: {error}.") from error
        changes = self._changes(directory, settings, tensors)
        parts = [part for parts in changes.values() for part in parts if part is not None]
        return Adapter(
            load_id=hashlib.sha256(settings.canonical() + b"\0" + data).hexdigest(),
            changes={self._own[site]: changes[site] for site in changes.keys() & self._own.keys()},
            rank=max(part.rank for part in parts),
            num_modules=len(parts),
        )

    def _read_file(self, file: Path) -> bytes:
        try:
            size = file.stat().st_size
            if size > self._most_bytes:
                raise AdapterError(
                    f"{file} has {size} bytes, more than an adapter of rank"
                    f" max_lora_rank={self._config.max_lora_rank} for this model can have,"
                    f" {self._most_bytes}."
                )
            return file.read_bytes()
        except OSError as error:
            raise AdapterError(f"{file} cannot be read: {error.strerror}.") from error

    def _changes(
        self, directory: Path, settings: AdapterSettings, tensors: Mapping[str, torch.Tensor]
    ) -> dict[int, list[LowRank | None]]:
        faults = _Faults()
        changes: dict[int, list[LowRank | None]] = {}
        for module, pair in self._pairs(tensors, faults).items():
            place = self._places[module]
            change = self._change(module, place, pair, settings, faults)
            empty: list[LowRank | None] = [None] * len(self._sites[place.site].modules)
            changes.setdefault(place.site, empty)[place.part] = change
        if not changes and not faults.kinds:
            raise AdapterError(f"The adapter {directory} changes nothing: it holds no matrices.")
        faults.raise_if_any(directory)
        return changes

    def _pairs(self, tensors: Mapping[str, torch.Tensor], faults: _Faults) -> dict[str, _Pair]:
        pairs: dict[str, _Pair] = {}
        for name, tensor in tensors.items():
            match = _KEY.fullmatch(name)
            if match is None:
                faults.add("tensors that are no matrices of LoRA", name)
                continue
            module = self._known(match[1])
            if module is None:
                hint = did_you_mean(match[1], self._places)
                faults.add("of modules that cannot be adapted", f"{match[1]}{hint}")
                continue
            pair = pairs.setdefault(module, _Pair())
            setattr(pair, match[2].lower(), tensor)
        return pairs

    def _known(self, module: str) -> str | None:
        """What the model calls it."""
        for given in (module, canonical_name(module)):
            for prefix in _PREFIXES:
                for name in (prefix + given, given.removeprefix(prefix)):
                    if name in self._places:
                        return name
        return None

    def _change(
        self, module: str, place: Place, pair: _Pair, settings: AdapterSettings, faults: _Faults
    ) -> LowRank | None:
        if pair.a is None or pair.b is None:
            faults.add("modules with one matrix of two", module)
            return None
        site, rank = self._sites[place.site], settings.rank_of(module)
        width = site.whole_widths[place.part]
        for letter, tensor, shape in (
            ("A", pair.a, (rank, site.column_share.total)),
            ("B", pair.b, (width, rank)),
        ):
            if tuple(tensor.shape) != shape:
                found = f"{module}.lora_{letter} {tuple(tensor.shape)} for {shape}"
                faults.add("of a wrong shape", found)
                return None
            if tensor.dtype not in _READ:
                faults.add("of an unknown type", f"{module}.lora_{letter} {tensor.dtype}")
                return None
            if not torch.isfinite(tensor).all():
                faults.add("that hold NaN or infinite values", f"{module}.lora_{letter}")
                return None
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        b = pair.b if site.row_order is None else pair.b[site.row_order]
        a, b = site.own_columns(pair.a), site.own_rows(place.part, b)
        return LowRank(a.to(dtype), b.to(dtype), settings.scale_of(module))


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return ", ".join([*names[:_MOST_LISTED], *more])
