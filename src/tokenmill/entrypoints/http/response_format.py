"""The form that a request wants its answer in: `response_format`, `structured_outputs`, and the
older `guided_*` fields, all of which amount to `StructuredOutputsParams`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.entrypoints.http.protocol import SamplingFields
from tokenmill.errors import InvalidRequestError, shown
from tokenmill.structured_outputs import (
    KINDS,
    StructuredOutputsParams,
    as_structured_outputs,
)

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields that older clients send, and what they are called now."""
_GUIDED_OPTIONS = {
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "backend",
}
_NAME = "structured_outputs"


@dataclass(frozen=True, slots=True)
class Form:
    """What form the answer must have, and which fields said so."""

    params: StructuredOutputsParams
    fields: Mapping[str, str]
    """The engine's parameters to the fields that the client sent, where the names differ."""

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None if it is of another kind."""
        if self.params.kind == "json_object":
            return {"type": "object"}
        if self.params.kind != "json":
            return None
        schema = msgspec.json.decode(self.params.source)
        return schema if isinstance(schema, dict) else {"allOf": [schema]}


def form_of(fields: SamplingFields) -> Form | None:
    """The form that a request asks for; None for free text.

    Raises `InvalidRequestError` that names the field.
    """
    given = [
        name for name in ("response_format", _NAME, *_GUIDED) if getattr(fields, name) is not None
    ]
    if fields.response_format is not None and _type_of(fields.response_format) == "text":
        given.remove("response_format")
    options = {
        option: value
        for name, option in _GUIDED_OPTIONS.items()
        if (value := getattr(fields, name)) is not None
    }
    if len(given) > 1:
        raise InvalidRequestError(
            f"{' and '.join(given)} each ask for a form of the answer; send one of them.",
            parameter=given[0],
        )
    if options and (not given or given[0] not in _GUIDED):
        name = next(name for name, option in _GUIDED_OPTIONS.items() if option in options)
        raise InvalidRequestError(
            f"{name} needs one of {', '.join(_GUIDED)}; leave it out.", parameter=name
        )
    if not given:
        return None
    return _read(fields, given[0], options)


def _read(fields: SamplingFields, name: str, options: Mapping[str, Any]) -> Form:
    value = getattr(fields, name)
    if name == _NAME:
        params = as_structured_outputs(value)
        assert params is not None
        return Form(params, {})
    if name in _GUIDED:
        kind = _GUIDED[name]
        names = {f"{_NAME}.{kind}": name, _NAME: name}
        names |= {f"{_NAME}.{option}": guided for guided, option in _GUIDED_OPTIONS.items()}
        with _blamed_on(names):
            return Form(StructuredOutputsParams(**{kind: value}, **options), names)
    return _read_response_format(value)


def _read_response_format(value: Mapping[str, Any]) -> Form:
    kind = _type_of(value)
    name = "response_format"
    names = {_NAME: name, **{f"{_NAME}.{each}": name for each in KINDS}}
    if kind == "json_object":
        return Form(StructuredOutputsParams(json_object=True), names)
    if kind == "structural_tag":
        with _blamed_on(names):
            return Form(StructuredOutputsParams(structural_tag=dict(value)), names)
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise _missing("response_format.json_schema", "an object with a name and a schema")
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        raise _missing("response_format.json_schema.schema", "a JSON schema")
    names[f"{_NAME}.json"] = "response_format.json_schema.schema"
    with _blamed_on(names):
        return Form(StructuredOutputsParams(json=dict(schema)), names)


def _type_of(response_format: Mapping[str, Any]) -> str:
    kind = response_format.get("type")
    if kind not in _TYPES:
        raise InvalidRequestError(
            f"response_format.type={shown(kind)} is not one of {', '.join(_TYPES)}.",
            parameter="response_format.type",
        )
    return str(kind)


def _missing(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is missing; it must be {what}.", parameter=name)


@contextmanager
def _blamed_on(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that the client sent."""
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.parameter or "", "response_format")
        message = re.sub(rf"^{re.escape(error.parameter or '')}\b", lambda _: name, str(error))
        raise type(error)(message, parameter=name) from error
