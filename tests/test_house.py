"""One home for each noun: no circles of imports, nothing too long to see at once."""

import ast

from tests.test_layers import SOURCES, imported

MODULES = set(SOURCES)


def needs(module: str) -> set[str]:
    """The project's modules that one names in an import, anywhere in it, also where only types are checked."""
    found = set()
    for name in imported(module, SOURCES[module]):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """A way round for each module that needs itself in the end, the shortest, without repeating a circle."""
    found = dict[frozenset[str], str]()
    for start in sorted(graph):
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            if start in graph[way[-1]]:
                found.setdefault(frozenset(way), " -> ".join([*way, start]))
                break
            for other in sorted(graph[way[-1]] - seen):
                seen.add(other)
                ways.append([*way, other])
    return list(found.values())


def test_no_circle():
    assert circles({module: needs(module) for module in MODULES}) == []


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == ["a -> b -> c -> a"]


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


def too_long(module: str, source: str) -> list[str]:
    """The file and the functions of a module that are over the limits, without docstrings and `self`.

    A verb of an operation has its builder in place of `self`.
    """
    lines = len(source.splitlines())
    found = [f"{module}: {lines} lines"] if lines > FILE else []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{module}.{node.name}"
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        length = (node.end_lineno or 0) - body[0].lineno + 1
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls", "recorder", "run") for argument in given)
        if length > BODY:
            found.append(f"{name}: {length} lines")
        if count > PARAMETERS and not name.startswith(tuple(EXCEPTIONS)):
            found.append(f"{name}: {count} parameters")
    return found


def test_nothing_is_too_long():
    assert [line for module, source in SOURCES.items() for line in too_long(module, source)] == []


def test_what_is_too_long_is_seen():
    body = "def f(a, b, c, d, e, g, h, i, j):\n" + "    pass\n" * 61
    assert too_long("m", body) == ["m.f: 61 lines", "m.f: 9 parameters"]
    assert too_long("m", "x = 1\n" * 651) == ["m: 651 lines"]


def test_no_character_is_written_by_its_name():
    """To compile such a text Python imports unicodedata, and of Ctrl-C in the middle it makes a SyntaxError."""
    assert [module for module, source in SOURCES.items() if "\\N{" in source] == []
