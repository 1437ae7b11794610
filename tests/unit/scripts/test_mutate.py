"""Test the mutants of scripts/mutate: each changes one thing and leaves valid Python."""

import ast
import subprocess
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "tools"))
import mutants as finder
import mutate


@pytest.fixture(autouse=True)
def no_collected_tests(monkeypatch):
    """Collect no tests, which takes a minute, but for those of a test; forget what was found for others."""
    monkeypatch.setattr(mutate, "collected", frozenset)
    for cached in (mutate.of_module, mutate.list_sampled_cases, mutate.list_family_cases):
        cached.cache_clear()


def mutate_source(source: str, kind: str) -> list[str]:
    """Return the source with each fault of a type."""
    data = source.encode()
    return [fault.applied(data).decode() for fault in finder.faults(data) if fault.kind == kind]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("comparison", "a < b", ["a <= b"]),
        ("comparison", "a <= b < c", ["a < b < c", "a <= b <= c"]),
        ("comparison", "(a) is not (b)", ["(a) is (b)"]),
        ("comparison", "é in b", ["é not in b"]),
        ("operator", "x = a + b", ["x = a - b"]),
        ("operator", "x = 'a' + b", []),
        ("operator", "x = (a // b) * c", ["x = (a // b) // c", "x = (a * b) * c"]),
        ("and/or", "x = a and b", ["x = a or b"]),
        ("part of a condition", "x = a and not b", ["x = ((not b))", "x = ((a))"]),
        ("sign", "x = not a", ["x = (a)"]),
        ("sign", "x = -a", ["x = (a)"]),
        ("number", "x = 3", ["x = 4", "x = 2"]),
        ("number", "x = 0", ["x = 1"]),
        ("number", "x = 1_000", ["x = 10000", "x = 100"]),
        ("number", "x = 8 + 64", ["x = 9 + 64", "x = 7 + 64", "x = 8 + 128", "x = 8 + 32"]),
        ("number", "x = -1", ["x = 0"]),
        ("number", "x = 0.5", ["x = 5.0"]),
        ("number", "x: Literal[3] = a", []),
        ("default", "def f(a: int = 1, *, b=True): pass", ["def f(a: int = 1, *, b=False): pass"]),
        ("default", "x = zip(a, b, strict=True)", []),
        ("default", "def f(a=True):\n    'What it does.'\n    ...", []),
        ("condition", "if a:\n    b()", ["if not (a):\n    b()"]),
        ("check", "if a:\n    raise b", ["pass"]),
        ("check", "if a:\n    b()\nelse:\n    raise b", []),
        ("choice", "x = a if b else c", ["x = (a)", "x = (c)"]),
        ("statement", "a.b(c)", ["pass"]),
        ("statement", "a += 1", ["pass"]),
        ("statement", '"""What it is."""', []),
        ("with", "with a, b:\n    c()", ["with __import__('contextlib').nullcontext():\n    c()"]),
        ("with", "with a as b:\n    c()", []),
        ("filter", "x = [a for a in b if a]", ["x = [a for a in b if True]"]),
        ("min/max", "x = min(a, b)", ["x = (a)", "x = (b)"]),
        ("order", "x = sorted(a)", ["x = list(a)"]),
        ("arguments", "f(a, b, c)", ["f(b, a, c)"]),
        ("arguments", "f(a, a)", []),
        ("arguments", "b.f(a, c)", ["b.f(c, a)"]),
        ("arguments", "b.add(a, c)", []),
        ("argument", "f(a, b=c)", ["f(a)"]),
        ("argument", "f(b=c)", []),
        ("number", "f'{a:3}'", []),
    ],
)
def test_each_fault_type_changes_what_it_names(kind: str, source: str, expected: list[str]):
    assert mutate_source(source, kind) == expected


def test_all_faults_are_valid_and_change_the_source():
    source = (ROOT / "localllm" / "generation" / "sampling" / "candidates.py").read_bytes()
    faults = finder.faults(source)
    valid = [fault for fault in faults if finder.is_valid(fault.applied(source))]
    assert len(faults) >= len(valid) > 40
    for fault in valid:
        assert ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source)), fault
    assert {"TokenHistory.append", "SequenceBreakers.push"} <= {fault.function for fault in faults}


def test_a_seed_draws_the_same_faults_again():
    paths = mutate.modules(["generation", "errors.py"])
    first, again, other = (list(mutate.drawn(paths, 20, seed)) for seed in (1, 1, 2))
    assert first == again and len(set(first)) == 20
    assert len(set(first) & set(other)) < 10


def test_all_packages_and_quant_have_faults():
    assert len(mutate.modules(mutate.PARTS)) > 400
    assert mutate.modules(["quantizing", "quant"])[0].startswith("localllm/quantizing/")
    assert "quant/affine.py" in mutate.modules(["quant"])


def test_a_line_range_selects_its_faults():
    places = mutate.placed("localllm/generation/sampling/candidates.py:20-30")
    assert places and all(20 <= mutant.fault.line <= 30 for mutant in places)


@pytest.mark.sampled
def test_unexecuted_functions_get_the_tests_of_their_module(monkeypatch, tmp_path):
    monkeypatch.setattr(mutate, "executed", dict)
    [mutant, *_] = mutate.placed("scripts/tools/mutants.py")
    assert mutate.tests_of(mutant, 10) == []
    [mutant, *_] = mutate.placed("localllm/generation/sampling/candidates.py")
    assert "tests/unit/generation/sampling/test_steps.py" in mutate.tests_of(mutant, 10)
    assert "tests/integration/test_cli.py" in mutate.by_imports("localllm/cli/commands/warmup.py"), "its name"
    assert mutate.by_imports("localllm/quantizing/adapters.py") and mutate.by_imports("quant/affine.py")


def test_the_most_specific_tests_come_first(monkeypatch):
    [mutant, *_] = [
        each for each in mutate.placed("localllm/generation/sampling/candidates.py") if "push" in each.fault.function
    ]
    name = "localllm/generation/sampling/candidates.py:SequenceBreakers.push"
    known = {name: [(90, 1.0, "c"), (3, 2.0, "a"), (50, 20.0, "b"), (95, 2.5, "d"), (96, 1.0, "e")]}
    monkeypatch.setattr(mutate, "executed", lambda: known)
    assert mutate.tests_of(mutant, 5) == ["a", "c", "e"]
    assert mutate.tests_of(mutant, 0) == ["a"]
    known[name] = known[name][:1]
    known[f"{name}2"] = [(1, 1.0, "of the module")]
    monkeypatch.setattr(mutate, "by_imports", lambda path: ["of those that import it"])
    assert mutate.tests_of(mutant, 5) == ["c", "of the module", "of those that import it"], "if there are few"


@pytest.mark.parametrize(
    ("path", "cases"),
    [("a/b.py", ["a/test_b.py::t[2]"]), ("a/b/c.py", ["a/test_b.py::t[2]"]), ("a/c.py", []), ("a.py", [])],
)
def test_cases_that_the_map_lacks_are_added_from_the_modules_own_test_file(monkeypatch, path: str, cases: list[str]):
    names = ("a/test_b.py::t[1]", "a/test_b.py::t[2]", "c/test_b.py::t[1]")
    monkeypatch.setattr(mutate, "collected", lambda: frozenset(f"tests/unit/{name}" for name in names))
    monkeypatch.setattr(mutate, "recorded", lambda folder: [("tests/unit/a/test_b.py::t[1]", 1.0, set())])
    assert mutate.list_sampled_cases(f"localllm/{path}") == [f"tests/unit/{case}" for case in cases]


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        ("arch/families/olmo.py", ["convert/a.py::t[olmo]", "convert/a.py::u[olmo-old]"]),
        ("arch/families/llama.py", ["convert/a.py::t[mixtral]"]),
        ("convert/families/hunyuan.py", ["convert/a.py::u[1-hy_v3]"]),
        ("generation/generate.py", []),
    ],
)
def test_families_get_all_cases_of_their_models_and_checkpoints(monkeypatch, path: str, cases: list[str]):
    names = ["t[olmo]", "t[mixtral]", "u[olmo-old]", "u[1-hy_v3]", "v"]
    collected = [*(f"tests/unit/convert/a.py::{name}" for name in names), "tests/unit/text/a.py::t[olmo]"]
    monkeypatch.setattr(mutate, "collected", lambda: collected)
    assert mutate.list_family_cases(f"localllm/{path}") == [f"tests/unit/{case}" for case in cases]


@pytest.mark.parametrize(
    ("function", "tests"),
    [("f", [*"abcde"]), ("C._f", [*"abcde"]), ("", ["module", *"abcde"]), ("C", ["module", *"abcde"])],
)
def test_code_outside_functions_gets_the_tests_of_its_module(monkeypatch, function: str, tests: list[str]):
    """Skip tests that run own processes and are not seen to call its functions."""
    own = [(50 + number, 1.0, test) for number, test in enumerate("abcde")]
    known = {f"x.py:{function}": own, "x.py:g": [(3, 1.0, "module"), (99, 1.0, "late")], "y.py:g": [(1, 1.0, "other")]}
    monkeypatch.setattr(mutate, "executed", lambda: known)
    mutant = mutate.Mutant("x.py", mutate.Fault(1, 0, 0, "", "number", function))
    assert mutate.tests_of(mutant, len(tests)) == tests


@pytest.mark.sampled
def test_a_mutant_is_killed_only_by_a_test_that_checks_it(tmp_path):
    """Run in a copy of the tree."""
    mutant = next(iter(mutate.placed("localllm/generation/sampling/candidates.py")))
    (tmp_path / "localllm" / "generation" / "sampling").mkdir(parents=True)
    for name in ("right", mutant.path):
        (tmp_path / name).write_bytes((ROOT / mutant.path).read_bytes())
    (tmp_path / "test_x.py").write_text(
        "from pathlib import Path\n\ndef test_x():\n"
        f"    assert Path({mutant.path!r}).read_bytes() == Path('right').read_bytes()\n"
    )
    (tmp_path / "test_y.py").write_text("def test_y():\n    pass\n")
    (tmp_path / "test_w.py").write_text("def test_w():\n    assert False\n")
    (tmp_path / "test_z.py").write_text("import time\n\ndef test_z():\n    time.sleep(60)\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--commit')\n")
    assert [
        mutate.outcome(tmp_path, mutant, tests, limit)
        for tests, limit in (
            (["test_x.py"], 60),
            (["test_y.py"], 60),
            (["test_w.py::test_w", "test_y.py::test_y"], 60),  # one that fails anyway
            ([], 60),
            (["test_z.py"], 0.1),
        )
    ] == ["noticed", "survived", "survived", "untested", "hung"]
    assert (tmp_path / mutant.path).read_bytes() == (ROOT / mutant.path).read_bytes(), "and it is gone again"


@pytest.mark.sampled
def test_the_functions_executed_by_a_test_are_recorded(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "from localllm.generation.sampling.candidates import TokenHistory\n\n"
        "def test_x():\n    TokenHistory(3).append(1)\n"
    )
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts' / 'tools'}",
        "EXECUTED": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "coverage_plugin", "-p", "no:cacheprovider", "test_x.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    [record] = [path.read_text() for path in tmp_path.glob("*.jsonl")]
    assert (
        "localllm/generation/sampling/candidates.py:TokenHistory.append" in record and "TokenHistory.copy" not in record
    )
