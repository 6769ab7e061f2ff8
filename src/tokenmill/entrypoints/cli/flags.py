"""Flags, derived from the fields of `EngineArgs` and `SamplingParams` and the texts below them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import Group, Parameter, Token

from tokenmill.config.engine_args import EngineArgs
from tokenmill.sampling_params import SamplingParams

NOT_A_FLAG = Parameter(parse=False)

SAMPLING = Parameter(name="*", group=Group("Sampling", sort_key=1))
ENGINE = Parameter(name="*", group=Group("Engine", sort_key=2))

Lora = Annotated[
    Path | None,
    Parameter(help="Directory of a LoRA adapter in PEFT's format; adapters are enabled for it."),
]

Images = Annotated[
    list[Path] | None,
    Parameter(
        name="--image",
        alias="-i",
        help="A file with an image, for a model that takes them; may be given several times.",
    ),
]

Quiet = Annotated[
    bool,
    Parameter(alias="-q", negative=(), help="Neither progress nor figures on stderr."),
]


def json_object(type_: type, tokens: Sequence[Token]) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        return msgspec.json.decode(tokens[0].value, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(
            f"{tokens[0].value} must be a JSON object such as '{{\"key\": 1}}' ({error})."
        ) from None


JSON_OBJECT = Parameter(converter=json_object, accepts_keys=False, n_tokens=1, negative=())


def field_docs(owner: type) -> dict[str, str]:
    """Field name to the string below the field, in one line."""
    module = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    (body,) = (
        node.body
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    docs = {}
    for node, below in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[node.target.id] = " ".join(str(below.value.value).split())
    return docs


def engine_flags(name: str, without: Collection[str]) -> type:
    """A dataclass of the fields of `EngineArgs`, as flags."""
    defaults = EngineArgs()
    names = [each.name for each in dataclasses.fields(EngineArgs) if each.name not in without]
    return _flag_class(name, EngineArgs, {each: getattr(defaults, each) for each in names})


def sampling_flags(name: str, without: Collection[str]) -> type:
    """A dataclass of the fields of `SamplingParams`, as flags, each None unless it is given.

    The defaults are the model's, so they are not known before it is loaded.
    """
    names = [each for each in SamplingParams.__struct_fields__ if each not in without]
    return _flag_class(name, SamplingParams, dict.fromkeys(names))


def option_flags(owner: type, *, only: Collection[str] | None = None) -> type:
    """A dataclass of the fields of the dataclass `owner`, of all or `only` of these, as flags."""
    defaults = {
        each.name: each.default
        if each.default_factory is dataclasses.MISSING
        else each.default_factory()
        for each in dataclasses.fields(owner)
        if only is None or each.name in only
    }
    return _flag_class(f"{owner.__name__}Flags", owner, defaults)


def _flag_class(name: str, owner: type, defaults: Mapping[str, Any]) -> type:
    """A dataclass with fields of `owner` (name to default), their types and their texts."""
    hints, docs = get_type_hints(owner), field_docs(owner)
    fields = []
    for field_name, default in defaults.items():
        hint = _flag_type(hints[field_name])
        is_object = hint == dict[str, Any]
        hint = hint if default is not None else hint | None
        special = JSON_OBJECT if is_object else SHORT.get(field_name)
        repeated = (
            " Repeat the flag for more than one."
            if hint == list[str] | None or (hint == list[int] | None)
            else ""
        )
        fields.append(
            (
                field_name,
                Annotated[hint, special, Parameter(help=docs[field_name] + repeated)],
                dataclasses.field(default_factory=type(default))
                if isinstance(default, dict | list)
                else default,
            )
        )
    # In the module "types", where they would land, cyclopts takes classes for atoms.
    return dataclasses.make_dataclass(
        name, fields, frozen=True, kw_only=True, namespace={"__module__": __name__}
    )


def _flag_type(hint: Any) -> Any:
    """The type of a field as a flag has it: structs and dicts are JSON objects, classes names."""
    options = [each for each in get_args(hint) if each is not NoneType]
    kind = options[0] if NoneType in get_args(hint) and len(options) == 1 else hint
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return dict[str, Any]
    return list[str] if kind == list[Any] else hint


SHORT = {
    "model": Parameter(alias="-m"),
    "tensor_parallel_size": Parameter(alias="-tp"),
    "pipeline_parallel_size": Parameter(alias="-pp"),
}
"""Flags that have a short form, too."""
NOT_ON_THE_COMMAND_LINE = {
    "detokenize", "flat_logprobs", "output_kind", "skip_clone", "skip_tokenizer_init",
    "stream_interval",
}  # fmt: skip
"""The commands stream text, token by token."""

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    EngineFlags = EngineArgs
else:
    # `--seed` is the request's
    EngineFlags = engine_flags("EngineFlags", without=NOT_ON_THE_COMMAND_LINE | {"seed"})
ENGINE_DEFAULTS = EngineFlags()


def given_params(flags: object) -> dict[str, Any]:
    """The sampling parameters among the flags, checked before minutes go into loading a model.

    Without `--max-tokens` the model writes until it stops or its context is full.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    given.setdefault("max_tokens", None)
    SamplingParams(**given)
    return given
