"""Checks of single values that users give: each returns the value in its one form.

All raise `InvalidRequestError` that names the parameter, the value and the limit.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequestError, refuse_unknown, shown

MAX_INTEGER = 2**63 - 1
"""Of parameters without a limit of their own: what a message between processes can carry."""


class StrictKeywords(msgspec.StructMeta):
    """Structs of which refuse unknown keywords with the nearest known one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_unknown(self.__name__, kwargs, self.__struct_fields__)
        return super().__call__(*args, **kwargs)


def refusal(name: str, value: object, rule: str) -> InvalidRequestError:
    """An error that says which rule the value of a parameter breaks."""
    return InvalidRequestError(f"{name}={shown(value)}: {rule}.", parameter=name)


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite number from `low` to `high`; `open_low` leaves `low` itself out."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    if not _is_a(numbers.Real, value) or value != value:
        raise refusal(name, value, f"must be a finite number in {interval}")
    if not low <= value <= high or (open_low and value == low):
        raise refusal(name, value, f"must lie in {interval}")
    return float(value)


def integer(name: str, value: Any, low: int, high: int = MAX_INTEGER) -> int:
    """An integer from `low` to `high`."""
    limit = f"at least {low}" if high == MAX_INTEGER else f"between {low} and {high}"
    if not _is_a(numbers.Integral, value):
        raise refusal(name, value, f"must be an integer, {limit}")
    if value < low:
        raise refusal(name, value, f"must be {limit}")
    if value > high:
        raise refusal(name, value, f"must be at most {high}")
    return int(value)


def optional_integer(name: str, value: object, low: int, high: int = MAX_INTEGER) -> int | None:
    """The same, or None."""
    return None if value is None else integer(name, value, low, high)


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "must be True or False")
    return value


def as_list(name: str, value: object, what: str) -> list[Any]:
    """The items of anything that is iterable, but no string."""
    try:
        if not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable):
            return list(value)
    except TypeError:  # a tensor without dimensions is iterable only by its class
        pass
    raise refusal(name, value, f"must be a list of {what}")


def strings(name: str, value: object, *, limit: int, longest: int, empty: str) -> list[str]:
    """Non-empty strings, at most `limit` of up to `longest` characters; one may come as it is.

    `empty` says why an empty one is refused.
    """
    items = [value] if isinstance(value, str) else as_list(name, value, "strings")
    if len(items) > limit:
        raise refusal(name, f"{len(items)} strings", f"at most {limit} are allowed")
    for text in items:
        if not isinstance(text, str):
            raise refusal(name, text, "every entry must be a string")
        if not text:
            raise refusal(name, text, empty)
        if len(text) > longest:
            rule = f"a string may have {longest} characters, this one has {len(text)}"
            raise refusal(name, text, rule)
    return items


def token_ids(name: str, value: object, limit: int) -> list[int] | None:
    """Ids, each once, in their order; None without any. At most `limit` may be given."""
    if value is None:
        return None
    ids = as_list(name, value, "token ids")
    if len(ids) > limit:
        raise refusal(name, f"{len(ids)} ids", f"at most {limit} are allowed")
    if not are_ids_below(ids, MAX_INTEGER):
        ids = [integer(name, token_id, 0) for token_id in ids]
    return list(dict.fromkeys(ids)) or None


def are_ids_below(ids: list[Any], limit: int) -> bool:
    """Whether all are integers of Python from 0 to below `limit`, found out quickly: a list may be
    as long as a vocabulary or a context. If not, it takes a look at each to say what is wrong.
    """
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limit)


def token_weights(
    name: str, value: object, *, limit: int, lowest: float, highest: float
) -> dict[int, float] | None:
    """A finite number for each of some ids, which JSON writes as strings; None without any.

    Numbers beyond `lowest` and `highest` become these. At most `limit` may be given.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refusal(name, value, "must map token ids to numbers")
    if len(value) > limit:
        raise refusal(name, f"{len(value)} entries", f"at most {limit} are allowed")
    found: dict[int, float] = {}
    for key, weight in value.items():
        if not _is_a(numbers.Real, weight) or not abs(weight) < float("inf"):
            raise refusal(name, weight, f"the number of token {shown(key)} must be finite")
        found[_token_id_key(name, key)] = min(max(float(weight), lowest), highest)
    return found or None


def _token_id_key(name: str, key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20:
        key = int(key)
    if not _is_a(numbers.Integral, key):
        raise refusal(name, key, "every key must be a token id")
    return integer(name, key, 0)


def _is_a(kind: type, value: object) -> bool:
    """Whether a value is a number of this kind, of Python or of numpy; truth values are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
