"""Render untrusted chat templates with Jinja in a sandbox.

Jinja's immutable sandbox denies a template access to files, modules and Python's internals, and prevents all changes.
Limits stop a template that runs forever or creates huge values: they are checked for every iteration of a loop, item of
a filter, call and operator, and sizes before a value is created. Functions and filters that no released template uses
are removed: lipsum, cycler, joiner, bytes, and filters that lay out text. template_probe.py first renders an unknown
template in a separate process, which stops a template that circumvents these limits.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from datetime import datetime
from threading import local
from typing import Any, NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localllm.text.special_tokens import BREAK

SECONDS = 2.0  # CPU seconds of one rendering; released templates take milliseconds
MAX_LENGTH = 8_000_000  # maximum characters of a string
MAX_CREATED = 256_000_000  # maximum bytes of all strings that one rendering creates
MAX_ITEMS = 200_000  # maximum items of a list, including nested lists
MAX_BITS = 10_000  # maximum bits of an integer
MAX_WIDTH = 1000  # maximum width of a format's field, or of an indentation
_METHODS = frozenset([
    *["get", "keys", "values", "items", "copy", "count", "index", "find", "rfind", "rindex"],
    *["split", "rsplit", "splitlines", "partition", "rpartition", "strip", "lstrip", "rstrip"],
    *["replace", "join", "format", "startswith", "endswith", "removeprefix", "removesuffix", "ljust", "rjust", "zfill"],
    *["lower", "upper", "title", "capitalize", "casefold", "swapcase"],
    *["isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal"],
    *["append", "extend", "insert", "pop", "update", "setdefault"],  # these fail, since nothing can be changed
])  # fmt: skip
# Filters that consume all items before they return.
GATHERING = ("join", "list", "sort", "unique", "groupby", "min", "max", "sum", "reverse")
_rendering = (
    local()
)  # .deadline: CPU time at which this thread's rendering must end; .made: bytes of values created so far


class LimitError(Exception):
    """A template runs too long or creates a value that is too large."""


def reset_limits() -> None:
    """Start counting anew in this thread, before a template is compiled or rendered."""
    _rendering.deadline, _rendering.made = time.thread_time() + SECONDS, 0


def count_step(nbytes: int = 0) -> None:
    """Count an iteration of a loop, or a new value of `nbytes` bytes. Raises LimitError."""
    _rendering.made += nbytes
    if time.thread_time() > _rendering.deadline:
        raise LimitError(f"it ran for more than {SECONDS:g} seconds")
    if _rendering.made > MAX_CREATED:
        raise LimitError(f"it created more than {MAX_CREATED} bytes of text")


def get_bits(value: object) -> int:
    """Return the bit length of an integer, 0 for any other value."""
    return value.bit_length() if isinstance(value, int) else 0


def get_repetitions(value: object) -> float:
    """Return how much the operator * can lengthen its other operand with this one."""
    return abs(value) if isinstance(value, int | float) else len(value) if isinstance(value, str | list | tuple) else 1


def require_small(value: object) -> object:
    """Return a value of acceptable size. Raises LimitError; the items of an iterator are counted later."""
    if isinstance(value, str):
        if len(value) > MAX_LENGTH:
            raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
        count_step(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict):
        count_step(8 * len(value))
        return require_few_items(value)
    elif isinstance(value, KeysView | ValuesView | ItemsView):  # their str() has no limit
        return require_small(list(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise LimitError(f"a number exceeds {MAX_BITS} bits")
    elif isinstance(value, Iterator):
        return count_items(value)
    return value


def count_items(items: Iterator[object]) -> Iterator[object]:
    """Yield the items and count each like an iteration of a loop. Raises LimitError."""
    for number, item in enumerate(items):
        if number > MAX_ITEMS:
            raise LimitError(f"a value has more than {MAX_ITEMS} items")
        count_step(8)
        yield item


def convert_to_sequence(items: Any) -> Sequence[object] | dict[object, object]:
    """Convert an iterable to a list, unless its length can be checked as it is. Raises LimitError."""
    return items if isinstance(items, str | list | tuple | dict) else list(count_items(iter(items)))


def require_few_items(value: object, written: bool = False) -> object:
    """Return a container unchanged. Raises LimitError if it has too many items.

    Nested items count, too; an item that occurs twice counts twice. written: the container will be converted to text,
    so the total length of its strings counts as well.
    """
    parts, length, waiting = 0, 0, list[Any]([value])
    while waiting:
        container = waiting.pop()
        if isinstance(container, LoopContext):
            raise LimitError("the variable `loop` cannot be stored in a list")
        container = container._Namespace__attrs if isinstance(container, Namespace) else container
        parts += len(container)
        if parts > MAX_ITEMS:
            raise LimitError(f"a value has more than {MAX_ITEMS} items")
        inner = container.values() if isinstance(container, dict) else container
        if written:
            length += sum(len(text) for text in inner if isinstance(text, str))
            length += sum(len(key) for key in container if isinstance(key, str)) if isinstance(container, dict) else 0
            if length > MAX_LENGTH:
                raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
        waiting += [item for item in inner if isinstance(item, list | tuple | dict | Namespace | LoopContext)]
    return value


def to_text(value: object) -> str:
    """Convert a value to str. Raises LimitError if it is too large."""
    if isinstance(value, str):
        return value
    return str(require_few_items(value, written=True) if isinstance(value, list | tuple | dict) else value)


def check_values(values: tuple[object, ...]) -> None:
    """Raise LimitError for values that a format or a filter cannot convert to text within the limits."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise LimitError(f"a number exceeds {MAX_BITS} bits")
        if isinstance(value, list | tuple | dict | LoopContext):
            require_few_items(value, written=True)


def check_method(owner: object, name: str, arguments: tuple[object, ...], named: dict[str, object]) -> None:
    """Raise LimitError for a method call on a string, number or container that is forbidden or returns too much."""
    if name not in _METHODS:
        raise LimitError(f"{type(owner).__name__}.{name} is not supported in templates")
    if name in ("ljust", "rjust", "zfill") and any(isinstance(n, int) and n > MAX_WIDTH for n in arguments):
        raise LimitError(f"a width exceeds {MAX_WIDTH}")
    if isinstance(owner, str) and name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        growth = owner.count(old) * (len(new) - len(old)) if isinstance(old, str) and isinstance(new, str) else 0
        if len(owner) + growth > MAX_LENGTH:
            raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
    if isinstance(owner, str) and name in ("split", "rsplit", "splitlines") and len(owner) > MAX_ITEMS:
        separators = [argument for argument in (*arguments, *named.values()) if isinstance(argument, str) and argument]
        if (owner.count(separators[0]) if separators else len(owner) // 2) > MAX_ITEMS:
            raise LimitError(f"a value has more than {MAX_ITEMS} items")
    if isinstance(owner, str) and name == "join" and arguments:
        check_join(owner, arguments[0])


def check_join(separator: str, items: object) -> None:
    """Raise LimitError if `separator.join(items)` would be too long."""
    if isinstance(items, list | tuple | dict | str):
        texts = items.values() if isinstance(items, dict) else items
        length = sum(len(item) if isinstance(item, str) else 1 for item in texts) if not isinstance(items, str) else 1
        if length + len(separator) * len(items) + len(items) > MAX_LENGTH:
            raise LimitError(f"a value exceeds {MAX_LENGTH} characters")


def check_layout(layout: str) -> None:
    """Raise LimitError unless the widths in a format, such as %9d or {:9}, are small constants.

    %*d and {:{}} are rejected, and so are {0.name} and {0[1]}, which access values that no check has seen.
    """
    if re.search(r"[0-9]{4}|%[^a-zA-Z%]*\*|{[^{}]*{", layout):
        raise LimitError(f"a width exceeds {MAX_WIDTH - 1}")
    if re.search(r"{[^{}:!]*[.\[]", layout):
        raise LimitError("attributes and items in format fields are not supported in templates")


def check_filter_result(name: str, text: str, arguments: tuple[object, ...], other_arguments: tuple[Any, ...]) -> None:
    """Raise LimitError if the result of a filter would be too long.

    other_arguments: all arguments except the text.
    """
    if name == "replace" and len(arguments) > 1:
        check_method(text, "replace", tuple(map(str, arguments)), {})
    widths = [len(each) if isinstance(each, str) else each or 0 for each in other_arguments]
    width = max(widths, default=4)
    if name == "indent" and (text.count("\n") + 1) * width > MAX_LENGTH:
        raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
    if name in (*GATHERING, "batch", "items", "title", "urlencode") and name != "join" and len(text) > MAX_ITEMS:
        raise LimitError(f"a value has more than {MAX_ITEMS} items")


def check_format_result(layout: str, values: tuple[object, ...]) -> None:
    """Raise LimitError if a format with its values would be too long; each field counts as the longest value."""
    check_values(values)
    longest = max(map(estimate_length, values), default=0)
    if len(layout) + (layout.count("%") + layout.count("{")) * longest > MAX_LENGTH:
        raise LimitError(f"a value exceeds {MAX_LENGTH} characters")


def estimate_length(value: object) -> int:
    """Estimate the length of a value as text, once require_few_items has checked it."""
    if isinstance(value, dict):
        return estimate_length((*value, *value.values()))
    if isinstance(value, list | tuple):
        return sum(4 + estimate_length(item) for item in value)
    return len(value) if isinstance(value, str) else MAX_BITS // 3 if isinstance(value, int) else 20


def check_indented_json(value: object, indent: int) -> None:
    """Raise LimitError if indented JSON, with a line per item indented by its depth, would be too long."""
    length, depth, layer = 0, 0, [value]
    while layer := [item for item in layer if isinstance(item, list | tuple | dict)]:
        depth += 1
        length += depth * indent * sum(len(parts) + 1 for parts in layer)
        if length > MAX_LENGTH:
            raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
        layer = [item for parts in layer for item in (parts.values() if isinstance(parts, dict) else parts)]


MAX_SOURCE = 500_000  # maximum characters of a template; released ones have up to 30 000
MAX_BRANCHES = 1000  # maximum branches of an `if`; Python's parser raises MemoryError for several thousand

_REMOVED_FILTERS = ("center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordcount",
"wordwrap",
             "xmlattr")  # fmt: skip


class TemplateRefusalError(TemplateError):
    """The template called raise_exception, because it does not support this conversation."""


def compile_template(source: str, strict: bool = False) -> Template:
    """Compile a template with guards that enforce the limits.

    strict: raise an error for an undefined variable instead of rendering nothing. Raises LimitError, and the errors of
    Jinja and Python for invalid source.
    """
    if len(source) > MAX_SOURCE:
        raise LimitError(f"it has {len(source)} characters, but the limit is {MAX_SOURCE}")
    reset_limits()
    environment = _LimitedEnvironment()
    environment.undefined = StrictUndefined if strict else Undefined
    return environment.from_string(_GuardInserter().visit(environment.parse(source)))


def render_template(template: Template, variables: dict[str, object]) -> str:
    """Render a compiled template.

    Raises TemplateRefusalError, LimitError, and any error that a template's code can raise.
    """
    reset_limits()
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_LENGTH:
            raise LimitError(f"the output exceeds {MAX_LENGTH} characters")
    return "".join(pieces)


class _Extension(Extension):
    """A Jinja extension with the functions that guards call; it ignores Hugging Face's {% generation %} tag."""

    identifier = "guards"
    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, length: int) -> str:
        """Count an iteration of a loop or a call of a macro, whose own text has `length` characters."""
        count_step(length)
        return ""

    def count_and_pass(self) -> bool:
        """Count an iteration within the condition of a filtered loop, and return True."""
        count_step()
        return True

    def concat(self, *parts: object) -> str:
        """Apply the operator ~, which Jinja's sandbox cannot intercept, within the limits."""
        text = "".join([to_text(part) for part in parts])
        require_small(text)
        return text

    def check_slice(self, value: object) -> object:
        """Check a slice of a string or list, which Jinja's sandbox cannot intercept."""
        return require_small(value)

    def check_literal(self, value: object) -> object:
        """Check a list, tuple or dictionary literal."""
        return require_few_items(value)


class _GuardInserter(NodeTransformer):
    """Inserts calls of `tick`, `concat` and `check_literal` into the syntax tree of a template."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _make_tick(node))
        if node.test is not None:
            node.test = nodes.And(_make_guard("count_and_pass", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _make_tick(node))
        return node

    def visit_If(self, node: nodes.If) -> nodes.If:  # noqa: N802
        if len(node.elif_) >= MAX_BRANCHES:
            raise LimitError(f"an `if` has more than {MAX_BRANCHES} branches")
        self.generic_visit(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _make_guard("concat", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _make_guard("check_slice", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _make_guard("check_literal", [node], node.lineno) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _make_guard("check_literal", [node], node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _make_guard("check_literal", [node], node.lineno) if node.items and node.ctx == "load" else node


def _make_tick(node: nodes.For | nodes.Macro) -> nodes.Output:
    """Build a call of `tick` for an iteration of a loop or a call of a macro."""
    size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    size += sum(len(text.value) for text in node.find_all(nodes.Const) if isinstance(text.value, str))
    tick = _make_guard("tick", [nodes.Const(size, lineno=node.lineno)], node.lineno)
    return nodes.Output([tick], lineno=node.lineno)


def _make_guard(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """Build a call of a method of _Extension."""
    function = nodes.ExtensionAttribute(_Extension.identifier, name, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class _Namespace(Namespace):
    """A namespace object that does not print its values, so that they need not be counted."""

    def __repr__(self) -> str:
        return "<namespace>"


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face's `apply_chat_template`, with a limit on each operation."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Extension], finalize=_finalize
        )
        self.filters |= {"format": _format_within_limits, "tojson": _to_json}
        self.filters = {name: _limit_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _count_test(function) for name, function in self.tests.items()}  # type: ignore[arg-type]
        self.globals = {name: self.globals[name] for name in ("range", "dict")}
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call(self, context: Context, function: object, /, *arguments: object, **named: object) -> object:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int | float | list | tuple | dict):
            if name == "join" and arguments:
                arguments = (convert_to_sequence(arguments[0]), *arguments[1:])
            check_method(owner, name, arguments, named)
        return require_small(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        check_layout(value.__self__)

        @functools.wraps(formatter)
        def formatted(*arguments: object, **named: object) -> str:
            check_format_result(value.__self__, (*arguments, *named.values()))
            return formatter(*arguments, **named)

        return formatted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        if operator in "**" and get_bits(left) and get_bits(right):
            if (
                get_bits(left) + get_bits(right) if operator == "*" else get_bits(left) * min(abs(right), MAX_BITS)
            ) > MAX_BITS:
                raise LimitError(f"a number exceeds {MAX_BITS} bits")
        elif operator == "*" and get_repetitions(left) * get_repetitions(right) > MAX_LENGTH:
            raise LimitError(f"a value exceeds {MAX_LENGTH} characters")
        elif operator == "%" and isinstance(left, str):
            check_layout(left)
            values = right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
            check_format_result(left, tuple(values))
        return require_small(super().call_binop(context, operator, left, right))


def _count_test(test: Callable[..., object]) -> Callable[..., object]:
    """Wrap a Jinja test so that each call counts, because select() may test many items and yield none."""

    @functools.wraps(test)
    def ticked(*arguments: object, **named: object) -> object:
        count_step()
        return test(*arguments, **named)

    return ticked


def _finalize(value: object) -> object:
    """Convert the value of an expression to the text that is output."""
    text = to_text(value)
    count_step(len(text))
    return text


def _limit_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a filter with limits. Some filters take Jinja's context or environment as their first argument."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*arguments: object, **named: object) -> object:
        if name in _REMOVED_FILTERS:
            raise LimitError(f"the filter {name} is not supported in templates")
        own_arguments = arguments[first:]
        value, other_arguments = own_arguments[0] if own_arguments else None, (*own_arguments[1:], *named.values())
        if any(isinstance(number, int) and abs(number) > MAX_WIDTH for number in other_arguments):
            raise LimitError(f"an argument of the filter {name} exceeds {MAX_WIDTH}")
        count_step()
        check_values(own_arguments)
        if isinstance(value, str):
            check_filter_result(name, value, own_arguments[1:], other_arguments)
        if name in GATHERING and isinstance(value, Iterator | range):
            value = convert_to_sequence(value)
            check_values((value,))
            arguments = (*arguments[:first], value, *own_arguments[1:])
        if name == "join":
            check_join(next((text for text in other_arguments if isinstance(text, str)), ""), value)
        if name == "sum" and any(isinstance(argument, list | tuple) for argument in other_arguments):
            raise LimitError("sums of lists are not supported in templates")
        return require_small(function(*arguments, **named))

    return checked


def _format_within_limits(layout: str, *arguments: object, **named: object) -> str:
    check_layout(layout)
    check_format_result(layout, (*arguments, *named.values()))
    return do_format(layout, *arguments, **named)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_WIDTH:
        raise LimitError(f"the format of strftime_now exceeds {MAX_WIDTH} characters")
    check_layout(layout)
    return datetime.now().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON like Hugging Face's tojson, which, unlike Jinja's, does not escape <, > and &.

    BREAK is not escaped either, so that Tokenizer.encode_rendered can remove it.
    """
    if (len(indent) if isinstance(indent, str) else indent or 0) > 16:
        raise LimitError("the indentation of tojson must be at most 16 characters")
    if separators is not None and sum(map(len, separators)) > 16:
        raise LimitError("the separators of tojson exceed 16 characters")
    if indent:
        check_indented_json(value, len(indent) if isinstance(indent, str) else indent)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and len(text) > MAX_ITEMS and not text.isascii():
        raise LimitError(f"the text of tojson with ensure_ascii exceeds {MAX_ITEMS} characters")
    return re.sub(rf"[^\0-~{BREAK}]", lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text
