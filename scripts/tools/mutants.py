"""Find places for small faults that a person could make: a number off by one, a missing check, a swapped order.

`faults(source)` lists the possible faults of a file. Each is a range of the text and its replacement; everything else
stays as it is. scripts/mutate inserts them.
"""

import ast
from contextlib import suppress
from typing import NamedTuple

SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
    ast.Div: "*", ast.Mod: "//", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
ORDER = {"sorted": "list", "reversed": "iter"}  # functions whose order is lost
SHORTENED = ("min", "max")
ALIKE = {"add", "multiply", "gcd", "lcm", "isclose"}  # methods whose arguments may change places
LARGE = 1000  # numbers from which on one more or less is nobody's fault, but a zero too many is
POWERS = 16  # powers of two from which on another one is
TYPES = ("Annotated", "Callable", "Iterator", "Literal", "dict", "list", "tuple", "type")


class Fault(NamedTuple):
    """A fault: a range of a file's bytes, and the text that replaces it.

    Attributes:
        line: of the file, from 1.  start, end: the range.  text: its replacement.  function: the qualified name of the
        function that it is in; "" outside of functions.
    """

    line: int
    start: int
    end: int
    text: str
    kind: str
    function: str

    def applied(self, source: bytes) -> bytes:
        """Return the file with the fault in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Collects the faults of one file."""

    def __init__(self, source: bytes):
        self.found, self._around, self._source = list[Fault](), list[str](), source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the byte range of a node."""
        start = self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self._source[start:end].decode()

    def add(self, kind: str, node: ast.AST, text: str) -> None:
        """Add a fault: another text for a node, or for a range (start, end)."""
        self.add_between(kind, node.lineno, *self.span(node), text)  # type: ignore[attr-defined]

    def add_between(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        self.found.append(Fault(line, start, end, text, kind, ".".join(self._around)))

    # ---- what is left out: types, texts that explain ----

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body):
            return  # a protocol's
        self._around.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._visit_body(node.body)
        self._around.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._around.append(node.name)
        self._visit_body(node.body)
        self._around.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: messages are no faults."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in TYPES):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: they state what always holds."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # so does zip's
            self.visit(node.value)

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    # ---- kinds ----

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._swap("comparison", operator, left, right)
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(side, ast.JoinedStr | ast.Constant) and isinstance(getattr(side, "value", ""), str)
                      for side in (node.left, node.right))  # fmt: skip
        is_type = isinstance(node.op, ast.BitOr) and any(
            isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)
        )
        if not (is_text or is_type):
            self._swap("operator", node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap("and/or", node.op, left, right)
        for number in range(len(node.values)):
            self.add("part of a condition", node, self._without(node, number))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add("sign", node, f"({self.text(node.operand)})")
        if isinstance(node.op, ast.Not) or not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)
        elif isinstance(node.operand.value, int | float):
            self.add("number", node, repr(self._others(-node.operand.value)[0]))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("default" if self._around else "constant", node, repr(not node.value))
        elif isinstance(node.value, int | float):
            for other in self._others(node.value):
                self.add("number", node, repr(other))

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.add("condition", node.test, f"not ({self.text(node.test)})")
            if not node.orelse and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue | ast.Break):
                self.add("check", node, "pass")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add("choice", node, f"({self.text(node.body)})")
        self.add("choice", node, f"({self.text(node.orelse)})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._drop(node)
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._drop(node)

    def visit_With(self, node: ast.With) -> None:
        first, last = node.items[0], node.items[-1]
        if all(item.optional_vars is None for item in node.items):
            start, end = self.span(first.context_expr)[0], self.span(last.context_expr)[1]
            self.add_between("with", node.lineno, start, end, "__import__('contextlib').nullcontext()")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.add("filter", test, "True")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if name in SHORTENED and len(plain) == len(node.args) == 2:
            for argument in plain:
                self.add("min/max", node, f"({self.text(argument)})")
        elif name in ORDER and plain:
            self.add("order", node, f"{ORDER[name]}({self.text(plain[0])})")
        elif name in ("isinstance", "getattr", "zip", "replace", "setattr") or getattr(node.func, "attr", "") in ALIKE:
            pass
        elif len(plain) > 1:
            self._swap_arguments(plain[0], plain[1])
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict", "key", "help", "metavar"):
                self._drop_keyword(node, keyword)
        if name != "TypeVar":
            self.generic_visit(node)

    # ---- how ----

    def _swap(self, kind: str, operator: ast.AST, left: ast.AST, right: ast.AST) -> None:
        """Add another operator between two nodes, if nothing else is between them."""
        text = SWAPPED.get(type(operator))
        start, end = self.span(left)[1], self.span(right)[0]
        between = self._source[start:end].decode()
        if text and "#" not in between:
            known = between.strip(" \n()")
            self.add_between(kind, left.end_lineno, start, end, between.replace(known, text, 1))  # type: ignore[attr-defined]

    def _without(self, node: ast.BoolOp, number: int) -> str:
        """Return a condition without one of its parts."""
        word = " and " if isinstance(node.op, ast.And) else " or "
        return "(" + word.join(f"({self.text(x)})" for place, x in enumerate(node.values) if place != number) + ")"

    def _swap_arguments(self, first: ast.AST, second: ast.AST) -> None:
        (start, middle), (behind, end) = self.span(first), self.span(second)
        between = self._source[middle:behind].decode()
        if self.text(first) != self.text(second):
            text = self.text(second) + between + self.text(first)
            self.add_between("arguments", first.lineno, start, end, text)  # type: ignore[attr-defined]

    def _drop_keyword(self, node: ast.Call, keyword: ast.keyword) -> None:
        """Remove a keyword argument and the comma before it."""
        start, end = self.span(keyword)
        before = self._source[:start].rstrip()
        if before.endswith(b",") and len(node.args) + len(node.keywords) > 1:
            self.add_between("argument", keyword.lineno, len(before) - 1, end, "")

    def _drop(self, node: ast.stmt) -> None:
        self.add("statement", node, "pass")

    def _others(self, number: float) -> list[float]:
        """Return other values: off by one, or by a factor."""
        if isinstance(number, int):
            if number >= POWERS and number.bit_count() == 1:
                return [number * 2, number // 2]
            if number >= LARGE:
                return [number * 10, number // 10]
            return [number + 1, number - 1] if number > 0 else [number + 1]
        return [number * 10 if number else 1.0]


def faults(source: bytes) -> list[Fault]:
    """List the possible faults of a file; a few of them leave invalid Python."""
    finder = Finder(source)
    finder.visit(ast.parse(source))
    return finder.found


def is_valid(source: bytes) -> bool:
    """Return whether a source is valid Python."""
    with suppress(SyntaxError, ValueError):
        ast.parse(source)
        return True
    return False
