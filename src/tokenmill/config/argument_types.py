"""Types of settings, checked by their annotations where they enter."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from tokenmill.errors import ConfigError, shown


class _Kind(NamedTuple):
    accepted: tuple[type, ...]
    convert: Callable[[Any], Any]
    """To the type of the annotation."""
    words: str


def _as_it_is(value: Any) -> Any:
    return value


_KINDS = {
    str: _Kind((str, os.PathLike), os.fspath, "a string"),
    bool: _Kind((bool,), _as_it_is, "True or False"),
    int: _Kind((numbers.Integral,), int, "an integer"),
    float: _Kind((numbers.Real,), _as_it_is, "a number"),
    dict: _Kind((Mapping,), dict, "a dict"),
    list: _Kind((list, tuple), list, "a list"),
}


def of_type(name: str, value: object, annotation: Any) -> Any:
    """`value` of the setting `name` as its annotation has it: `str`, `int | None`, `dict[...]`, ...

    numpy's numbers and paths are taken for what they stand for. Raises `ConfigError` for others.
    """
    options = [get_origin(each) or each for each in get_args(annotation)]
    optional = NoneType in options
    if optional and value is None:
        return None
    expected = options[0] if optional else get_origin(annotation) or annotation
    kind = _KINDS[expected]
    if isinstance(value, kind.accepted) and (expected is bool or not isinstance(value, bool)):
        return kind.convert(value)
    raise ConfigError(
        f"{name}={shown(value)} must be {kind.words}{', or None' if optional else ''}."
    )
