"""Flags, derived from the fields of `EngineArgs` and `SamplingParams` and the texts below them."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
from cyclopts import Group, Parameter, Token

from tokenmill.config.engine_args import EngineArgs
from tokenmill.sampling_params import SamplingParams

NOT_A_FLAG = Parameter(parse=False)

SAMPLING = Parameter(name="*", group=Group("Sampling", sort_key=1))
ENGINE = Parameter(name="*", group=Group("Engine", sort_key=2))

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


JsonObject = Annotated[
    dict[str, Any],
    Parameter(converter=json_object, accepts_keys=False, n_tokens=1, negative=()),
]


@dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineArgs):
    """`EngineArgs` for a command of one user: `--seed` is the request's, and text goes in and out.

    Fields are repeated only where a flag differs from what their type says.
    """

    model: Annotated[str, Parameter(alias="-m")] = EngineArgs.model
    hf_overrides: JsonObject = field(default_factory=dict)
    override_generation_config: JsonObject = field(default_factory=dict)
    seed: Annotated[int, NOT_A_FLAG] = EngineArgs.seed
    skip_tokenizer_init: Annotated[bool, NOT_A_FLAG] = EngineArgs.skip_tokenizer_init


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


def sampling_flags(name: str, without: Collection[str]) -> type:
    """A dataclass of the fields of `SamplingParams`, each None unless its flag is given.

    The defaults are the model's, so they are not known before it is loaded.
    """
    hints, docs = get_type_hints(SamplingParams), field_docs(SamplingParams)
    fields = [
        (field_name, Annotated[hints[field_name] | None, Parameter(help=docs[field_name])], None)
        for field_name in SamplingParams.__struct_fields__
        if field_name not in without
    ]
    # cyclopts takes classes of the module "types", where they would land, for atoms
    return make_dataclass(
        name, fields, frozen=True, kw_only=True, namespace={"__module__": __name__}
    )


NOT_ON_THE_COMMAND_LINE = {"detokenize", "output_kind"}
"""The commands stream text."""
ENGINE_DEFAULTS = EngineFlags()


def given_params(flags: object) -> dict[str, Any]:
    """The sampling parameters among the flags, checked before minutes go into loading a model.

    Without `--max-tokens` the model writes until it stops or its context is full.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    given.setdefault("max_tokens", None)
    SamplingParams(**given)
    return given
