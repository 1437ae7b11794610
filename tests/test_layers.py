"""Test the layers: imports go only downward, only the command line prints, and its start stays light."""

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from functools import cache

import pytest
from project import ROOT

from localllm.kernels.machine import detect_processor

# From the top: a module imports itself and what stands on a lower line.
LAYERS = [
    ["localllm.__main__"],
    ["localllm.cli"],
    ["localllm.server"],
    ["localllm.quantizing"],
    ["localllm.compat"],
    ["localllm", "localllm.services"],
    ["localllm.api"],
    ["localllm.convert"],
    ["localllm.generation"],
    ["localllm.images"],
    ["localllm.engine", "localllm.text"],
    ["localllm.kernels"],  # of arch they know the verbs, which they compute
    ["localllm.arch"],
    ["localllm.files"],
    ["localllm.values", "localllm.foreign_names", "localllm.frozen", "localllm.renamed"],
    ["localllm.errors"],
    ["localllm.quant"],
    ["localllm.system"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

SOURCES = {
    prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
    for folder, prefix in (("localllm", ""), ("quant", "localllm."))
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PACKAGES = {name.rpartition(".")[0] for name in SOURCES} | {"localllm"}


def room_of(name: str) -> str:
    """Return the table's entry for a dotted name, as localllm.engine for localllm.engine.lower.tape, or ""."""
    while name and name not in LEVEL:
        name = name.rpartition(".")[0]
    return name


@cache  # to parse all sources takes a second
def find_imports(module: str, source: str) -> list[str]:
    """Return every dotted name that a module imports, anywhere in it."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    names = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += (f"{origin}.{alias.name}" for alias in node.names)
    return names


def find_upward_imports(module: str, source: str) -> list[str]:
    """Return a module's imports that do not go downward."""
    room = room_of(module)
    rooms = {room_of(name) for name in find_imports(module, source)} - {"", room}
    return [f"{module} imports {other}" for other in sorted(rooms) if LEVEL[other] <= LEVEL[room]]


def find_prints(module: str, source: str) -> list[str]:
    """Return where a module writes to stdout."""
    writers = {"print", "sys.stdout", "sys.__stdout__", "from sys import stdout"}
    if not re.search("print|stdout", source):
        return []
    return [
        f"{module} line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name | ast.Attribute | ast.ImportFrom) and ast.unparse(node) in writers
    ]


def test_the_table_of_layers_names_every_package():
    rooms = {".".join(module.split(".")[:2]) for module in SOURCES}
    assert rooms <= LEVEL.keys(), "put the new module on its line of LAYERS"


def test_modules_import_only_from_lower_layers():
    assert [line for module, source in SOURCES.items() for line in find_upward_imports(module, source)] == []


# Packages whose subfolders neither import each other in a circle nor a module beside them that imports them.
LAYERED = (
    "arch", "cli", "convert", "engine", "files", "generation", "kernels.cpu", "kernels.cuda", "quantizing", "services",
)  # fmt: skip


def import_graph(package: str, sources: dict[str, str]) -> dict[str, set[str]]:
    """Return a package's subfolders and modules, and which others each imports at run time."""
    beginning, graph = f"localllm.{package}.", dict[str, set[str]]()
    for module, source in sources.items():
        if module.startswith(beginning):
            names = find_imports(module, without_type_checking(source))
            others = {name.removeprefix(beginning).split(".")[0] for name in names if name.startswith(beginning)}
            room = module.removeprefix(beginning).split(".")[0]
            graph[room] = graph.get(room, set()) | others - {room}
    return graph


def without_type_checking(source: str) -> str:
    tree = ast.parse(source)
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    lines = source.splitlines()
    for block in blocks:
        lines[block.lineno - 1 : block.end_lineno] = [""] * (block.end_lineno - block.lineno + 1)
    return "\n".join(lines)


@pytest.mark.parametrize("package", LAYERED)
def test_subfolders_import_in_no_circle(package: str):
    graph = import_graph(package, SOURCES)
    assert graph
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


@pytest.mark.parametrize(
    "sources",
    [
        {"engine.cpu.a": "from localllm.engine.cuda import b", "engine.cuda.b": "import localllm.engine.cpu.a"},
        {
            "engine.cpu.a": "from localllm.engine.engine import Engine",
            "engine.engine": "from localllm.engine.cpu.a import x",
        },
    ],
)
def test_an_import_cycle_between_subpackages_is_detected(sources: dict[str, str]):
    with pytest.raises(graphlib.CycleError):
        graph = import_graph("engine", {f"localllm.{module}": source for module, source in sources.items()})
        graphlib.TopologicalSorter(graph).prepare()


def test_no_module_is_imported_as_quant():
    """Import the folder quant/ as localllm.quant, since a `quant` would collide with a user's own quant.py."""
    names = {name for module, source in SOURCES.items() for name in find_imports(module, source)}
    for file in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        module, source = ".".join(file.relative_to(ROOT).with_suffix("").parts), file.read_text(encoding="utf-8")
        names |= {*find_imports(module, source)} if re.search(r"(?<!\.)\bquant\b", source) else set()
    assert [name for name in sorted(names) if name.partition(".")[0] == "quant"] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("localllm.generation.sampling.sampler", "from localllm import api"),
        ("localllm.kernels.reference", "def build():\n    import localllm.engine.lower.tape"),
        ("localllm.text.tokenizer", "from ..engine.model import Engine"),
        ("localllm.generation.session", "from localllm import open"),
        ("localllm.quant.formats", "from localllm.errors import ModelError"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str):
    assert len(find_upward_imports(module, source)) == 1


def test_no_command_imports_another():
    commands = {
        "bench",
        "cache",
        "chat",
        "completion",
        "config",
        "eval",
        "fit",
        "help",
        "imatrix",
        "inspect",
        "list",
        "map",
        "perplexity",
        "pull",
        "quantize",
        "rm",
        "run",
        "serve",
        "sessions",
        "tokenize",
        "warmup",
    }
    modules = {f"localllm.cli.commands.{name}" for name in commands}
    assert modules <= SOURCES.keys()
    assert [(one, other) for one in modules for other in find_imports(one, SOURCES[one]) if other in modules] == []


def test_only_the_command_line_prints():
    assert [
        line
        for module, source in SOURCES.items()
        if room_of(module) != "localllm.cli"
        for line in find_prints(module, source)
    ] == []


@pytest.mark.parametrize("source", ["print(1)", "import sys\nsys.stdout.write('')", "from sys import stdout"])
def test_a_print_is_found(source: str):
    assert len(find_prints("localllm.generation.session", source)) == 1


HEAVY = {"numpy", "numba", "llvmlite", "rich", "pydantic", "prompt_toolkit"}


@pytest.mark.parametrize(
    ("program", "needed"),
    [
        ("import localllm", set()),
        ("from localllm.cli.main import main; sys.argv[1:] = ['--help']; main()", set()),
        ("from localllm.cli.main import main; sys.argv[1:] = ['tokenize', '-h']; main()", set()),
        ("from localllm.cli.commands.completion import complete_word as c; c([], ''); c(['run', 'x'], '--te')", set()),
        (f"from localllm.cli.main import main; sys.argv[1:] = ['inspect', {__file__!r}]; main()", {"numpy"}),
    ],
)
def test_starting_imports_nothing_heavy(program: str, needed: set[str]):
    detect_processor()  # what LLVM says of it is asked once on a machine, and kept
    report = f"atexit.register(lambda: print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr))"
    command = [sys.executable, "-c", f"import atexit, sys; {report}; {program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == str(sorted(needed))
