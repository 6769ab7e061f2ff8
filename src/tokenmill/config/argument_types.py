"""Settings, checked where they enter: their types by their annotations, and their values."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from tokenmill.errors import ConfigError, did_you_mean, shown

T = TypeVar("T")


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

    numpy's numbers and paths are taken for what they stand for, and None for a dict without keys,
    as vLLM has it. Raises `ConfigError` for others.
    """
    options = [get_origin(each) or each for each in get_args(annotation)]
    optional = NoneType in options
    if optional and value is None:
        return None
    expected = options[0] if optional else get_origin(annotation) or annotation
    if expected is dict and value is None:
        return {}
    kind = _KINDS[expected]
    if isinstance(value, kind.accepted) and (expected is bool or not isinstance(value, bool)):
        return kind.convert(value)
    raise ConfigError(
        f"{name}={shown(value)} must be {kind.words}{', or None' if optional else ''}."
    )


def at_least(name: str, value: object, low: int) -> int:
    """`value` of the setting `name`, which must be an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={shown(value)} must be an integer of at least {low}.")
    return value


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """`value` of the setting `name`, which must be one of these."""
    if value not in known:
        raise ConfigError(
            f"{name}={shown(value)} is not one of: {', '.join(known)}.{did_you_mean(value, known)}"
        )
    return value


def convert_fields(settings: object, prefix: str = "") -> None:
    """Make the fields of a frozen dataclass what their annotations say, as `of_type` does."""
    for name, annotation in get_type_hints(type(settings)).items():
        value = of_type(f"{prefix}{name}", getattr(settings, name), annotation)
        object.__setattr__(settings, name, value)


def check_keys(name: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first key of the setting `name` that is not in `known`."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{name} has no {shown(key)}.{did_you_mean(str(key), known)}"
                f" It takes: {', '.join(known)}."
            )


def typed_keys(name: str, given: Mapping[str, Any], kind: type[T]) -> T:
    """The setting `name` as an instance of the dataclass `kind`. Raises `ConfigError` for keys that
    it does not have, and for values of other types than its annotations.
    """
    hints = get_type_hints(kind)
    check_keys(name, given, hints)
    values = {key: of_type(f"{name}.{key}", value, hints[key]) for key, value in given.items()}
    return kind(**values)
