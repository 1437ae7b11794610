"""Jinja as chat templates expect it, for templates from strangers.

Jinja's immutable sandbox keeps a template away from files, modules and Python's insides, and lets it change nothing.
Limits stop what it could still do: run for ever, or make huge values. They hold for every turn of a loop, call, filter
and operator, not within one of Python's own functions.
"""

import functools
import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from threading import local
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from localllm.text.plain import BREAK

SECONDS = 5.0  # for one rendering; released templates take milliseconds
LENGTH = 16_000_000  # characters of a string, items of a list, bits of an integer

_rendering = local()  # .deadline: when this thread's rendering has to be done


class RefusalError(TemplateError):
    """The template called raise_exception: the conversation is not what it was written for."""


class LimitError(Exception):
    """The template runs too long or makes too large a value."""


def compile_template(source: str, strict: bool = False) -> Template:
    """A template with guards in it; strict: a variable that does not exist is an error, and not empty.

    Raises what Jinja and Python raise for bad source.
    """
    environment = _Environment()
    environment.undefined = StrictUndefined if strict else Undefined
    return environment.from_string(_Guards().visit(environment.parse(source)))


def render_template(template: Template, variables: dict[str, Any]) -> str:
    """The template's output. Raises RefusalError, LimitError, and anything that the code in a template can raise."""
    _rendering.deadline = time.monotonic() + SECONDS
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > LENGTH:
            raise LimitError(f"the output is over {LENGTH} characters")
    return "".join(pieces)


class _Extension(Extension):
    """Hugging Face's {% generation %} tag, which only marks its content; and the functions that the guards call."""

    identifier = "guards"
    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self) -> str:
        """Called in every turn of a loop and every call of a macro."""
        if time.monotonic() > _rendering.deadline:
            raise LimitError(f"it ran for over {SECONDS:g} seconds")
        return ""

    def concat(self, *parts: Any) -> str:
        """The operator ~, which Jinja does not let an environment intercept."""
        return _limited("".join(map(str, parts)))


class _Guards(NodeTransformer):
    """Puts calls of `tick` and `concat` into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_guard("tick", [], node.lineno)], lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_guard("tick", [], node.lineno)], lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("concat", node.nodes, node.lineno)


def _guard(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.ExtensionAttribute(_Extension.identifier, name, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The settings, functions and filters of Hugging Face's `apply_chat_template`, each operation with its limit."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Extension])
        self.filters |= {"format": _format, "tojson": _to_json}
        self.filters = {name: _checked(function) for name, function in self.filters.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        _check_numbers(arguments)
        return _limited(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is not None:
            _check_layout(value.__self__)
        return formatter

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and not (_is_number(left) and _is_number(right)) and _times(left) * _times(right) > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")
        if operator == "**" and _times(left) * _times(right) > LENGTH:
            raise LimitError("a power is too large")
        if operator == "%" and isinstance(left, str):
            _check_layout(left)
        return _limited(super().call_binop(context, operator, left, right))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _times(value: Any) -> float:
    """What a value multiplies another's length by."""
    return abs(value) if _is_number(value) else len(value) if isinstance(value, str | list | tuple) else 1


def _limited(value: Any) -> Any:
    """The value, if it is not too large."""
    if isinstance(value, str | list | tuple) and len(value) > LENGTH:
        raise LimitError(f"a value is over {LENGTH} long")
    if isinstance(value, int) and value.bit_length() > LENGTH:
        raise LimitError(f"a number is over {LENGTH} bits long")
    return value


def _check_numbers(arguments: tuple[Any, ...]) -> None:
    """Widths and counts must be sensible."""
    if any(isinstance(argument, int) and abs(argument) > LENGTH for argument in arguments):
        raise LimitError(f"a number is over {LENGTH}")


def _check_layout(layout: str) -> None:
    """So must those in a format such as %9d or {:9}."""
    if re.search("[0-9]{6}", layout):
        raise LimitError("a width is over 99999")


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with limits."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_numbers((*arguments[1:], *named.values()))
        return _limited(function(*arguments, **named))

    return checked


def _format(layout: str, *arguments: Any, **named: Any) -> str:
    _check_layout(layout)
    return do_format(layout, *arguments, **named)


def _raise_exception(message: str) -> NoReturn:
    raise RefusalError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: unlike Jinja's, it leaves <, > and & as they are; and BREAK, which is to vanish again."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(rf"[^\0-~{BREAK}]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
