"""The jinja environment of chat templates: transformers' dialect, in a sandbox with limits.

On top of jinja's immutable sandbox (no underscore attributes, no changes to the data it is given):

- other templates cannot be included, imported or extended;
- every turn of a loop and every macro call looks at the clock (`Budget`), so that no loop outlives
  its time; `range` is bounded;
- operators, methods and filters that make large values of small ones are refused before they do.

What is not stopped: a single call that is slow on large input the user sent (sorting it, say), and
several values that are each below `MAX_CHARS`. Rendering holds the GIL, so servers do it in a
thread, where only this thread's own processor time counts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 2**24
"""Longest text (or list) that a template may build, in characters (or items)."""
MAX_SECONDS = 1.0
"""Processor time for rendering one conversation."""
MAX_RANGE = 10_000
_MAX_BITS = 4_096
"""Largest integer that a template may compute."""
BUDGET = "render budget"
"""Name of the `Budget` among a template's variables; no template can write it, having a blank."""
_REFUSED_TAGS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_WIDE_FIELD = re.compile(r"(?:%[-+ #0]*|[{:][^}]*)(?:\d{5,}|\*)")
"""A width in a format string that pads to a size nobody asks for in a prompt."""


class TemplateRefusalError(TemplateError):
    """What a template raises by `raise_exception`."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._chars_left = MAX_CHARS

    def check_clock(self) -> None:
        """Raise `SecurityError` if the time is up."""
        if time.thread_time() > self._deadline:
            raise SecurityError(f"rendering takes longer than {MAX_SECONDS:g} seconds")

    def spend(self, text: str) -> None:
        """Count output. Raises `SecurityError` over the limit."""
        self._chars_left -= len(text)
        if self._chars_left < 0:
            raise SecurityError(f"the output exceeds {MAX_CHARS} characters")
        self.check_clock()


class TemplateNamespace(Namespace):
    """`namespace(...)` whose attributes cannot be those of Python's object protocol."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # All positional, so that `namespace(self=...)` is an attribute like any other.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """One environment serves all templates: what belongs to a rendering is in its variables."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
        )
        del self.globals["lipsum"]
        self.globals |= {
            "range": _bounded_range,
            "dict": _new_dict,
            "namespace": TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters["tojson"] = _tojson
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap"):
            self.filters[name] = _checked_filter(name, self.filters[name])

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for refused in source.find_all(_REFUSED_TAGS):
            raise SecurityError(f"line {refused.lineno} uses another template")
        for looping in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(looping, nodes.For | nodes.Macro | nodes.CallBlock)
            look = self._method_call("look_at_clock", [])
            looping.body.insert(0, nodes.ExprStmt(look).set_lineno(looping.lineno))
        for concat in source.find_all(nodes.Concat):
            concat.nodes = [self._method_call("concatenate", concat.nodes)]
        return super()._generate(source, *args, **kwargs)

    @pass_context
    def look_at_clock(self, context: Context) -> None:
        """Called in every turn of a loop."""
        context.parent[BUDGET].check_clock()

    def concatenate(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _method_call(self, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja would go on with an undefined value, which prints as nothing."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BINOP_CHECKS[operator](left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_arguments(method.__name__, owner, args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"a value of {size} characters or items exceeds {MAX_CHARS}")


def _checked(result: Any) -> Any:
    """A result that could not be judged beforehand: it is at most a few operands long."""
    if isinstance(result, Sized):
        _check_size(len(result))
    return result


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, Sized) and isinstance(right, Sized):
        _check_size(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for value, factor in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(factor, int):
            _check_size(len(value) * factor)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_format(left: Any, _: Any) -> None:
    if isinstance(left, str) and _WIDE_FIELD.search(left):
        raise SecurityError("a format string has a very wide field")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError(f"an integer of {bits} bits exceeds {_MAX_BITS}")


_BINOP_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_format,
}


def _check_arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a string's method, or a filter of the same name, that would make a huge value."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int):
            _check_size(argument)
    if name in ("format", "format_map"):
        _check_format(value, None)
    elif name == "replace" and len(args) >= 2:
        _check_size(str(value).count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and isinstance(value, Sized) and isinstance(args[0], Sized):
        _check_size(len(value) * len(args[0]))
    elif name == "indent":
        width = [*args, *kwargs.values(), 4][0]
        _check_size(str(value).count("\n") * (len(width) if isinstance(width, str) else width))


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja's with the same checks; it may take the context or environment first."""
    takes_environment = int(hasattr(function, "jinja_pass_arg"))

    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *arguments = args[takes_environment:]
        _check_arguments(name, value, tuple(arguments), kwargs)
        return _checked(function(*args, **kwargs))

    checked.__dict__.update(function.__dict__)
    return checked


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"a range of {len(numbers)} numbers exceeds {MAX_RANGE}")
    return numbers


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(format: str) -> str:
    _check_format(format, None)
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it reads; jinja's own filter escapes it for HTML."""
    if indent is not None and indent > 16:
        raise SecurityError(f"tojson indents by at most 16, not {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
