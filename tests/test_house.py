"""Test that modules import in no circle and stay small enough to see at once."""

import ast

from tests.test_layers import SOURCES, find_imports

MODULES = set(SOURCES)


def needs(module: str) -> set[str]:
    """Return the project's modules that one imports anywhere, also for type checking."""
    needed = set()
    for name in find_imports(module, SOURCES[module]):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        needed.add(name)
    return needed - {"", module}


def find_circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the shortest import circle through each module, without repeating one."""
    circles = dict[frozenset[str], str]()
    for start in sorted(graph):
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            if start in graph[way[-1]]:
                circles.setdefault(frozenset(way), " -> ".join([*way, start]))
                break
            for other in sorted(graph[way[-1]] - seen):
                seen.add(other)
                ways.append([*way, other])
    return list(circles.values())


def test_modules_import_in_no_circle():
    assert find_circles({module: needs(module) for module in MODULES}) == []


def test_a_circle_of_modules_is_found():
    assert find_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == ["a -> b -> c -> a"]


# ---- sizes: what can be seen at once

FILE, BODY, PARAMETERS = 650, 60, 8
# By the beginning of a name: why it may have more parameters.
EXCEPTIONS = {
    "localllm.kernels.": "a kernel's parameters are its memory",
    "localllm.quant.affine.encode_rows": "compiled by Numba, which takes arrays one by one",
    "localllm.quant.codebook.": "compiled by Numba, which takes arrays one by one",
    "localllm.cli.commands.": "Typer reads a command's options off its parameters",
    "localllm.api.open_model": "what users say when they open a model, each by its name",
    "localllm.quantizing.imatrix.__init__": "what is read, for what, and how",
}


def find_too_long(module: str, source: str) -> list[str]:
    """Return the file and functions of a module over the limits, without docstrings and `self`.

    A verb of an operation has its builder in place of `self`.
    """
    lines = len(source.splitlines())
    lines_over = [f"{module}: {lines} lines"] if lines > FILE else []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{module}.{node.name}"
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        length = (node.end_lineno or 0) - body[0].lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls", "recorder", "run") for argument in arguments)
        if length > BODY:
            lines_over.append(f"{name}: {length} lines")
        if count > PARAMETERS and not name.startswith(tuple(EXCEPTIONS)):
            lines_over.append(f"{name}: {count} parameters")
    return lines_over


def test_files_and_functions_are_not_too_long():
    assert [line for module, source in SOURCES.items() for line in find_too_long(module, source)] == []


def test_long_files_and_functions_are_found():
    body = "def f(a, b, c, d, e, g, h, i, j):\n" + "    pass\n" * 61
    assert find_too_long("m", body) == ["m.f: 61 lines", "m.f: 9 parameters"]
    assert find_too_long("m", "x = 1\n" * 651) == ["m: 651 lines"]


def test_no_character_is_written_by_its_name():
    """Keep Python from importing unicodedata, where Ctrl-C becomes a SyntaxError."""
    assert [module for module, source in SOURCES.items() if "\\N{" in source] == []
