"""Jinja as chat templates expect it, for templates from strangers.

Jinja's immutable sandbox keeps a template away from files, modules and Python's insides, and lets it change nothing.
Limits stop what it could still do: run for ever, or make huge values. They hold for every turn of a loop, item of a
filter, call and operator, and look at sizes before something is made. What no released template uses is not there:
lipsum, cycler, joiner, bytes, and filters that lay out text. What gets through stops in trial.py, which goes first.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from datetime import datetime
from threading import local
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localllm.text.plain import BREAK

SECONDS = 2.0  # of the processor, for one rendering; released templates take milliseconds
SOURCE = 500_000  # characters of a template; released ones have up to 30 000
LENGTH = 8_000_000  # characters of a string
MADE = 256_000_000  # bytes of all strings that are made on the way
ITEMS = 200_000  # of a list, with all in it
BITS = 10_000  # of an integer
WIDTH = 1000  # of a field in a format, of an indentation
BRANCHES = 1000  # of an `if`; Python's parser raises MemoryError for some thousands

_METHODS = frozenset([
    *["get", "keys", "values", "items", "copy", "count", "index", "find", "rfind", "rindex"],
    *["split", "rsplit", "splitlines", "partition", "rpartition", "strip", "lstrip", "rstrip"],
    *["replace", "join", "format", "startswith", "endswith", "removeprefix", "removesuffix", "ljust", "rjust", "zfill"],
    *["lower", "upper", "title", "capitalize", "casefold", "swapcase"],
    *["isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal"],
    *["append", "extend", "insert", "pop", "update", "setdefault"],  # these fail: nothing can be changed
])  # fmt: skip
_NOT_HERE = ("center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordcount", "wordwrap",
             "xmlattr")  # fmt: skip

# Filters that go through all items at once.
_GATHERING = ("join", "list", "sort", "unique", "groupby", "min", "max", "sum", "reverse")

_rendering = local()  # .deadline: when this thread's rendering has to be done; .made: bytes of texts so far


class RefusalError(TemplateError):
    """The template called raise_exception: the conversation is not what it was written for."""


class LimitError(Exception):
    """The template runs too long or makes too large a value."""


def compile_template(source: str, strict: bool = False) -> Template:
    """A template with guards in it; strict: a variable that does not exist is an error, and not empty.

    Raises LimitError, and what Jinja and Python raise for bad source.
    """
    if len(source) > SOURCE:
        raise LimitError(f"{len(source)} characters are over {SOURCE}")
    _begin()
    environment = _Environment()
    environment.undefined = StrictUndefined if strict else Undefined
    return environment.from_string(_Guards().visit(environment.parse(source)))


def render_template(template: Template, variables: dict[str, Any]) -> str:
    """The template's output. Raises RefusalError, LimitError, and anything that the code in a template can raise."""
    _begin()
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > LENGTH:
            raise LimitError(f"the output is over {LENGTH} characters")
    return "".join(pieces)


def _begin() -> None:
    _rendering.deadline, _rendering.made = time.thread_time() + SECONDS, 0


def _tick(made: int = 0) -> None:
    """Called in every turn of a loop, and whenever something is made of so many bytes."""
    _rendering.made += made
    if time.thread_time() > _rendering.deadline:
        raise LimitError(f"it ran for over {SECONDS:g} seconds")
    if _rendering.made > MADE:
        raise LimitError(f"it made texts of over {MADE} bytes")


class _Extension(Extension):
    """Hugging Face's {% generation %} tag, which only marks its content; and the functions that the guards call."""

    identifier = "guards"
    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, length: int) -> str:
        """Called in every turn of a loop and every call of a macro, which writes so many characters of its own."""
        _tick(length)
        return ""

    def ticked(self) -> bool:
        """The same, in a condition that filters a loop."""
        _tick()
        return True

    def concat(self, *parts: Any) -> str:
        """The operator ~, which Jinja does not let an environment intercept."""
        return _limited("".join([_text(part) for part in parts]))

    def sliced(self, value: Any) -> Any:
        """A part of a text or list, for which Jinja does not ask the environment."""
        return _limited(value)

    def weighed(self, value: Any) -> Any:
        """A list, tuple or dictionary that the template writes down."""
        return _weighed(value)


class _Guards(NodeTransformer):
    """Puts calls of `tick`, `concat` and `weighed` into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _ticking(node))
        if node.test is not None:
            node.test = nodes.And(_guard("ticked", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _ticking(node))
        return node

    def visit_If(self, node: nodes.If) -> nodes.If:  # noqa: N802
        if len(node.elif_) >= BRANCHES:
            raise LimitError(f"an if has over {BRANCHES} branches")
        self.generic_visit(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _guard("concat", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("sliced", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("weighed", [node], node.lineno) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("weighed", [node], node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _guard("weighed", [node], node.lineno) if node.items and node.ctx == "load" else node


def _ticking(node: nodes.For | nodes.Macro) -> nodes.Output:
    """A call of `tick` for a turn of a loop."""
    own = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    own += sum(len(text.value) for text in node.find_all(nodes.Const) if isinstance(text.value, str))
    tick = _guard("tick", [nodes.Const(own, lineno=node.lineno)], node.lineno)
    return nodes.Output([tick], lineno=node.lineno)


def _guard(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.ExtensionAttribute(_Extension.identifier, name, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class _Namespace(Namespace):
    """What a template gathers values in. It is no text: nothing counts what would be in it."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """The settings, functions and filters of Hugging Face's `apply_chat_template`, each operation with its limit."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Extension], finalize=_finalized
        )
        self.filters |= {"format": _format, "tojson": _to_json}
        self.filters = {name: _checked(name, function) for name, function in self.filters.items()}
        self.tests = {name: _ticked(function) for name, function in self.tests.items()}  # type: ignore[arg-type]
        self.globals = {name: self.globals[name] for name in ("range", "dict")}
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int | float | list | tuple | dict):
            if name == "join" and arguments:
                arguments = (_held(arguments[0]), *arguments[1:])
            _check_method(owner, name, arguments, named)
        return _limited(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        _check_layout(value.__self__)

        @functools.wraps(formatter)
        def formatted(*arguments: Any, **named: Any) -> str:
            _check_filled(value.__self__, (*arguments, *named.values()))
            return formatter(*arguments, **named)

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in "**" and _bits(left) and _bits(right):
            if (_bits(left) + _bits(right) if operator == "*" else _bits(left) * min(abs(right), BITS)) > BITS:
                raise LimitError(f"a number is over {BITS} bits long")
        elif operator == "*" and _size(left) * _size(right) > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")
        elif operator == "%" and isinstance(left, str):
            _check_layout(left)
            values = right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
            _check_filled(left, tuple(values))
        return _limited(super().call_binop(context, operator, left, right))


def _ticked(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that may be made for each of many items, none of which it lets through."""

    @functools.wraps(test)
    def ticked(*arguments: Any, **named: Any) -> Any:
        _tick()
        return test(*arguments, **named)

    return ticked


def _bits(value: Any) -> int:
    """Of an integer; 0 for anything else."""
    return max(1, value.bit_length()) if isinstance(value, int) else 0


def _size(value: Any) -> float:
    """What a value multiplies another's length by."""
    return abs(value) if isinstance(value, int | float) else len(value) if isinstance(value, str | list | tuple) else 1


def _limited(value: Any) -> Any:
    """The value, if it is not too large; an iterator ticks."""
    if isinstance(value, str):
        if len(value) > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")
        _tick(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict):
        _tick(8 * len(value))
        return _weighed(value)
    elif isinstance(value, KeysView | ValuesView | ItemsView):  # which would be written without a limit
        return _limited(list(value))
    elif isinstance(value, int) and value.bit_length() > BITS:
        raise LimitError(f"a number is over {BITS} bits long")
    elif isinstance(value, Iterator):
        return _counted(value)
    return value


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    """What a filter finds one by one: its loop is as a template's."""
    for number, item in enumerate(items):
        if number > ITEMS:
            raise LimitError(f"a value has over {ITEMS} parts")
        _tick(8)
        yield item


def _held(items: Any) -> Any:
    """What is to be gone through at once, as something that can be weighed."""
    return items if isinstance(items, str | list | tuple | dict) else list(_counted(iter(items)))


def _weighed(value: Any, written: bool = False) -> Any:
    """The value, if it does not have too many parts, all that it holds counted as often as it holds it.

    written: it is going to be a text, in which its own texts may not be too long together.
    """
    parts, length, rest = 0, 0, [value]
    while rest:
        held = rest.pop()
        if isinstance(held, LoopContext):
            raise LimitError("a loop cannot be kept in a list")
        held = held._Namespace__attrs if isinstance(held, Namespace) else held
        parts += len(held)
        if parts > ITEMS:
            raise LimitError(f"a value has over {ITEMS} parts")
        inner = held.values() if isinstance(held, dict) else held
        if written:
            length += sum(len(text) for text in inner if isinstance(text, str))
            length += sum(len(key) for key in held if isinstance(key, str)) if isinstance(held, dict) else 0
            if length > LENGTH:
                raise LimitError(f"a value is over {LENGTH} long")
        rest += [item for item in inner if isinstance(item, list | tuple | dict | Namespace | LoopContext)]
    return value


def _text(value: Any) -> str:
    """As str gives it, of a value that is not too large for that."""
    return (
        value
        if isinstance(value, str)
        else str(_weighed(value, written=True) if isinstance(value, list | tuple | dict) else value)
    )


def _finalized(value: Any) -> Any:
    """What is written to the output."""
    text = _text(value)
    _tick(len(text))
    return text


def _check_parts(values: tuple[Any, ...]) -> None:
    """Numbers, texts and lists that go into a text, by a format or a filter."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > BITS:
            raise LimitError(f"a number is over {BITS} bits long")
        if isinstance(value, list | tuple | dict | LoopContext):
            _weighed(value, written=True)


def _check_method(owner: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What the methods of texts and lists make must not be too long; those that nobody needs are not there."""
    if name not in _METHODS:
        raise LimitError(f"{type(owner).__name__}.{name} is not supported in templates")
    if name in ("ljust", "rjust", "zfill") and any(isinstance(n, int) and n > WIDTH for n in arguments):
        raise LimitError(f"a width is over {WIDTH}")
    if (
        isinstance(owner, str)
        and name == "replace"
        and len(arguments) > 1
        and all(isinstance(argument, str) for argument in arguments[:2])
    ):
        old, new = arguments[:2]
        if len(owner) + owner.count(old) * (len(new) - len(old)) > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")
    if isinstance(owner, str) and name in ("split", "rsplit", "splitlines") and len(owner) > ITEMS:
        separators = [argument for argument in (*arguments, *named.values()) if isinstance(argument, str) and argument]
        if (owner.count(separators[0]) if separators else len(owner) // 2) > ITEMS:
            raise LimitError(f"a value has over {ITEMS} parts")
    if isinstance(owner, str) and name == "join" and arguments:
        _check_join(owner, arguments[0])


def _check_join(separator: str, items: Any) -> None:
    """Before texts are put together."""
    if isinstance(items, list | tuple | dict | str):
        texts = items.values() if isinstance(items, dict) else items
        length = sum(len(item) if isinstance(item, str) else 1 for item in texts) if not isinstance(items, str) else 1
        if length + len(separator) * len(items) + len(items) > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")


def _check_layout(layout: str) -> None:
    """Widths in a format, such as %9d or {:9}, must be sensible, and be in it: %*d and {:{}} take them elsewhere.
    A field is a value that was given, and not a part of one, such as {0.name} or {0[1]}, which nothing would measure.
    """
    if re.search(r"[0-9]{4}|%[^a-zA-Z%]*\*|{[^{}]*{", layout):
        raise LimitError(f"a width is over {WIDTH - 1}")
    if re.search(r"{[^{}:!]*[.\[]", layout):
        raise LimitError("parts of values in a format are not supported in templates")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with limits. Some come with Jinja's context or environment as the first argument."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if name in _NOT_HERE:
            raise LimitError(f"the filter {name} is not supported in templates")
        given = arguments[first:]
        value, others = given[0] if given else None, (*given[1:], *named.values())
        if any(isinstance(number, int) and abs(number) > WIDTH for number in others):
            raise LimitError(f"a number for the filter {name} is over {WIDTH}")
        _tick()
        _check_parts(given)
        if isinstance(value, str):
            _check_filtered(name, value, given[1:], others)
        if name in _GATHERING and isinstance(value, Iterator | range):
            value = _held(value)
            _check_parts((value,))
            arguments = (*arguments[:first], value, *given[1:])
        if name == "join":
            _check_join(next((text for text in others if isinstance(text, str)), ""), value)
        if name == "sum" and any(isinstance(other, list | tuple) for other in others):
            raise LimitError("sums of lists are not supported in templates")
        return _limited(function(*arguments, **named))

    return checked


def _check_filtered(name: str, text: str, arguments: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """What filters make of a text."""
    if name == "replace" and len(arguments) > 1:
        _check_method(text, "replace", tuple(map(str, arguments)), {})
    width = max((len(other) if isinstance(other, str) else other or 0 for other in others), default=4)
    if name == "indent" and (text.count("\n") + 1) * width > LENGTH:
        raise LimitError(f"a value is over {LENGTH} long")
    if name in (*_GATHERING, "batch", "items", "title", "urlencode") and name != "join" and len(text) > ITEMS:
        raise LimitError(f"a value has over {ITEMS} parts")


def _check_filled(layout: str, values: tuple[Any, ...]) -> None:
    """What a layout becomes when each of its fields is as long as the longest value."""
    _check_parts(values)
    longest = max(map(_written_length, values), default=0)
    if len(layout) + (layout.count("%") + layout.count("{")) * longest > LENGTH:
        raise LimitError(f"a value is over {LENGTH} long")


def _written_length(value: Any) -> int:
    """How many characters a value has as a text, about; it does not have too many parts."""
    if isinstance(value, dict):
        return _written_length((*value, *value.values()))
    if isinstance(value, list | tuple):
        return sum(4 + _written_length(item) for item in value)
    return len(value) if isinstance(value, str) else BITS // 3 if isinstance(value, int) else 20


def _format(layout: str, *arguments: Any, **named: Any) -> str:
    _check_layout(layout)
    _check_filled(layout, (*arguments, *named.values()))
    return do_format(layout, *arguments, **named)


def _raise_exception(message: str) -> NoReturn:
    raise RefusalError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > WIDTH:
        raise LimitError(f"a layout of a time is over {WIDTH} characters")
    _check_layout(layout)
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: unlike Jinja's, it leaves <, > and & as they are; and BREAK, which is to vanish again."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > 16:
        raise LimitError("an indentation is over 16")
    if separators is not None and sum(map(len, separators)) > 16:
        raise LimitError("separators are over 16 characters")
    if indent:
        _check_indented(value, len(indent) if isinstance(indent, str) else indent)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and len(text) > ITEMS and not text.isascii():
        raise LimitError(f"a text to write in ASCII is over {ITEMS} long")
    return re.sub(rf"[^\0-~{BREAK}]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _check_indented(value: Any, indent: int) -> None:
    """Each part of a value has a line of its own, which is indented as deep as it lies."""
    length, depth, layer = 0, 0, [value]
    while layer := [item for item in layer if isinstance(item, list | tuple | dict)]:
        depth += 1
        length += depth * indent * sum(len(held) + 1 for held in layer)
        if length > LENGTH:
            raise LimitError(f"a value is over {LENGTH} long")
        layer = [item for held in layer for item in (held.values() if isinstance(held, dict) else held)]
