"""A checkpoint under the names of the library's modules.

Files keep the names that a model was published with. The library knows how they became those of its
modules: some are renamed, some tensors are joined or cut, such as the matrices of all experts of a
layer. What is only renamed is read as it is; the rest is converted by the library when it is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenmill.checkpoint.checkpoint import Checkpoint, RawTensor
from tokenmill.errors import CheckpointError
from tokenmill.layers.weights import plain_raw
from tokenmill.models.transformers_backend.library import library_module
from tokenmill.quantization.dequantize import plain_values

_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(slots=True)
class _Conversion:
    """Tensors of the file that become one or more of the model's, together."""

    converter: Any
    """The library's, with patterns instead of names."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name in the file, pattern that it matches), in the order in which they are joined."""
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    """What was made and not read yet."""


class NamedCheckpoint:
    """`source` as the library's model names its tensors; see `Checkpoint`.

    Names that it does not know stay as they are, so that the loader reports them.
    """

    def __init__(self, source: Checkpoint, model: Any) -> None:
        """`model` is the library's, with the modules that it was made with."""
        self.path = source.path
        self.config = source.config
        self.generation_config = source.generation_config
        self.tokenizer_data = source.tokenizer_data
        self.num_bytes = source.num_bytes
        self._source = source
        self._model = model
        self._wanted: Mapping[str, torch.Tensor] = model.state_dict()
        self._renamed: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        self._find()
        self.tensor_shapes: dict[str, tuple[int, ...]] = {
            **{name: tuple(source.tensor_shapes[old]) for name, old in self._renamed.items()},
            **{name: tuple(self._wanted[name].shape) for name in self._converted},
        }
        self.tensor_formats: dict[str, str] = {
            **{name: source.tensor_formats[old] for name, old in self._renamed.items()},
            **{name: _FORMATS[self._wanted[name].dtype] for name in self._converted},
        }

    def read(self, name: str) -> RawTensor:
        """The tensor of this name. Raises `CheckpointError` if it cannot be converted."""
        conversion = self._converted.get(name)
        if conversion is None:
            return self._source.read(self._renamed.get(name, name))
        if name not in conversion.results:
            conversion.results = self._convert(name, conversion)
        found = conversion.results.pop(name, None)
        if found is None or tuple(found.shape) != self.tensor_shapes[name]:
            shape = None if found is None else tuple(found.shape)
            raise CheckpointError(
                f"{self.path}: {conversion.sources[0][0]} and others became {name} of shape"
                f" {shape}, but the model has {self.tensor_shapes[name]}."
            )
        return plain_raw(found)

    def file_ranges(self, name: str) -> Sequence[Any]:
        """What `read` of this tensor reads of the files, in this order."""
        conversion = self._converted.get(name)
        if conversion is None:
            return self._source.file_ranges(self._renamed.get(name, name))
        return [part for old, _ in conversion.sources for part in self._source.file_ranges(old)]

    def stacked(self, name: str, count: int) -> list[list[str]] | None:
        """The tensors of the file that `name` stacks, if that is all that it does with `count` of
        them: for each, its parts, one below the other. From now on they are read one by one.
        """
        conversion = self._converted.get(name)
        if conversion is None or not _only_stacks(conversion.converter):
            return None
        by_pattern: dict[str, list[str]] = {}
        for old, pattern in conversion.sources:
            by_pattern.setdefault(pattern, []).append(old)
        patterns = conversion.converter.source_patterns
        if [len(by_pattern.get(pattern, ())) for pattern in patterns] != [count] * len(patterns):
            return None
        del self._converted[name], self.tensor_shapes[name], self.tensor_formats[name]
        for old, _ in conversion.sources:
            self.tensor_shapes[old] = tuple(self._source.tensor_shapes[old])
            self.tensor_formats[old] = self._source.tensor_formats[old]
        columns = (by_pattern[pattern] for pattern in patterns)
        return [list(parts) for parts in zip(*columns, strict=True)]

    def close(self) -> None:
        self._source.close()

    def _find(self) -> None:
        """Sort the file's names into those that are renamed and those that are converted."""
        loading = library_module("core_model_loading")
        mapping = library_module("conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(self._model)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        ignored = [
            re.compile(pattern) for pattern in self._model._keys_to_ignore_on_load_unexpected or ()
        ]
        prefix = self._model.base_model_prefix
        groups: dict[str, _Conversion] = {}
        for old in sorted(self._source.tensor_shapes, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(
                old, renamings, converters, prefix, self._wanted
            )
            if name not in self._wanted and old in self._wanted:
                name, pattern = old, None
            if name not in self._wanted:
                if not any(each.search(old) for each in ignored):
                    self._renamed[old] = old
            elif pattern is None:
                self._renamed[name] = old
            else:
                group = groups.setdefault(name, _Conversion(by_pattern[pattern]))
                group.sources.append((old, pattern))
        for name, group in groups.items():
            for target in self._targets(name, group.converter):
                self._converted[target] = group

    def _targets(self, name: str, converter: Any) -> list[str]:
        """Every tensor that a converter makes beside `name`, which has its first pattern."""
        first, *others = converter.target_patterns
        names = [name, *(name.replace(first, other) for other in others)]
        return [each for each in dict.fromkeys(names) if each in self._wanted]

    def _convert(self, name: str, conversion: _Conversion) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(conversion.converter)
        first = next(iter(key for key, each in self._converted.items() if each is conversion))
        for old, pattern in conversion.sources:
            values = plain_values(self._source.read(old))
            converter.add_tensor(first, old, pattern, lambda values=values: values)
        try:
            made = converter.convert(first, model=self._model, config=self._model.config)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: transformers cannot make {name} of {conversion.sources[0][0]} and"
                f" others: {error}."
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _only_stacks(converter: Any) -> bool:
    """Whether it stacks matrices, or pairs of matrices that lie one below the other."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    stack, join = ("MergeModulelist", 0), ("Concatenate", 1)
    return steps in ([stack], [stack, join])
