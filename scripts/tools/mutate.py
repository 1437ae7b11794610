"""Mutation testing: put small faults into localllm, one by one, and run the tests that execute the changed function.

    scripts/mutate map [PYTEST'S ARGUMENTS]        once: record which test executes what (minutes; can be resumed)
    scripts/mutate run --count 100 --seed 1        draw faults, and list those that no test noticed
    scripts/mutate run --count 100 --seed 1 --skip 60        the last 40 of them
    scripts/mutate run --at localllm/engine/memory/page_table.py:44-60     all possible faults there
    scripts/mutate list --count 100 --seed 1       print the faults, without trying them

It works on copies of the tree and never touches the tree itself. The map in build/executed/ says which tests execute a
function. If there are none (kernels are compiled, commands may run in processes of their own), the test files run whose
imports reach the module in the fewest steps. Faults in a family also meet all cases of its models and checkpoints, of
which the map has only a sample. Surviving faults are written to stdout, and the share noticed at the end.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from queue import Empty, Queue
from typing import NamedTuple

from coverage_plugin import recorded
from mutants import Fault, faults, is_valid

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "build" / "executed"
PARTS = (
    "engine",
    "generation",
    "files",
    "services",
    "quantizing",
    "cli",
    "arch",
    "convert",
    "text",
    "server",
    "images",
    "system",
)
ELSEWHERE = {"localllm/services/records/map_ray.py"}  # scripts/platform/test_ray tests it
MOST_TESTS, FEW = 400, 5
FILES_BY_IMPORT = 3
FAMILIES = ("localllm/arch/families/", "localllm/convert/families/")
FAMILY_TESTS = ("tests/unit/convert/", "tests/unit/arch/", "tests/goldens/")
MOST_CASES = 60  # of a family
SITE = "import sys\nsys.path.append({scripts!r})\nimport call_tracer\ncall_tracer.begin()\nsys.path.pop()\n"
COMMANDS = {path.stem.replace("_", "-"): path.stem for path in (ROOT / "localllm" / "cli" / "commands").glob("*.py")}
UNTESTED = 5  # pytest's exit code for no tests


class Mutant(NamedTuple):
    """A fault in a file, by its path from the root."""

    path: str
    fault: Fault

    @property
    def is_valid(self) -> bool:
        return is_valid(self.fault.applied((ROOT / self.path).read_bytes()))

    def __str__(self) -> str:
        source = (ROOT / self.path).read_bytes()
        before = " ".join(source[self.fault.start : self.fault.end].decode().split())
        after = " ".join(self.fault.text.split()) or "(nothing)"
        line = source.splitlines()[self.fault.line - 1].decode().strip()
        return f"{self.path}:{self.fault.line}: {self.fault.kind}: {before!r} -> {after!r}   in: {line}"


# ---- which faults ---------------------------------------------------------------------------------------------------


def modules(parts: Iterable[str]) -> list[str]:
    """Return the files of these parts of localllm: folders within it, or files; "quant" beside it."""
    found = []
    for part in parts:
        base = ROOT / (part if part.split("/")[0] == "quant" else f"localllm/{part}")
        if not base.exists():
            raise SystemExit(f"there is no {base}")
        files = base.rglob("*.py") if base.is_dir() else [base]
        found += [path.relative_to(ROOT).as_posix() for path in files]
    return sorted(path for path in found if path not in ELSEWHERE)


@cache
def faults_of(path: str) -> list[Fault]:
    return faults((ROOT / path).read_bytes())


def drawn(paths: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """Draw faults: files by their length, then functions and kinds of faults with equal chances."""
    draw, known = random.Random(seed), set[Mutant]()
    weights = [len((ROOT / path).read_bytes()) for path in paths]
    for _ in range(100 * count):
        path = draw.choices(paths, weights)[0]
        by_place = defaultdict[str, dict[str, list[Fault]]](lambda: defaultdict(list))
        for fault in faults_of(path):
            by_place[fault.function][fault.kind].append(fault)
        if by_place:
            kinds = by_place[draw.choice(sorted(by_place))]
            mutant = Mutant(path, draw.choice(kinds[draw.choice(sorted(kinds))]))
            if mutant not in known and mutant.is_valid:
                known.add(mutant)
                yield mutant
            if len(known) == count:
                return


def placed(place: str) -> list[Mutant]:
    """List all faults at PATH or PATH:LINE or PATH:FIRST-LAST."""
    path, _, lines = place.partition(":")
    first, _, last = lines.partition("-")
    begin, end = int(first or 0), int(last or first or 1 << 30)
    found = [Mutant(path, fault) for fault in faults_of(path) if begin <= fault.line <= end]
    return [mutant for mutant in found if mutant.is_valid]


# ---- selection of tests ----


@cache
def executed() -> dict[str, list[tuple[int, float, str]]]:
    """Return by function the tests that execute it: (how many functions the test executes, seconds, test)."""
    found = defaultdict[str, list[tuple[int, float, str]]](list)
    for test, seconds, names in recorded(MAP):
        for name in names if test in collected() else ():
            found[name].append((len(names), seconds, test))
    return found


@cache
def collected() -> frozenset[str]:
    """Return all tests that exist now: pytest would refuse others, which must not count as noticing a fault."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", "-p", "no:cacheprovider", "tests"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return frozenset(said.splitlines())


def tests_of(mutant: Mutant, seconds: float) -> list[str]:
    """Return the tests that execute a fault's function, or the one around it; the most specific first, up to `seconds`.

    With fewer than FEW tests, add those of the whole module, and if these are few the files that import it: a function
    that a fixture calls is recorded for one test only. Code outside of functions runs when its module is imported,
    which is recorded only for tests that start a process: its tests are those of the module.
    """
    names, found = mutant.fault.function.split("."), list[tuple[int, float, str]]()
    for count in range(len(names), 0, -1):
        found = found or executed().get(f"{mutant.path}:{'.'.join(names[:count])}", [])
    is_called = names[-1][:1].islower() or names[-1].startswith("_")  # not a module's or a class's
    if len(found) < FEW or not is_called:
        known = {test for _, _, test in found}
        found = [
            *((0 if is_called else special, each, test) for special, each, test in found),
            *(t for t in of_module(mutant.path) if t[2] not in known),
        ]
    tests = [*chosen(found, seconds), *list_sampled_cases(mutant.path), *list_family_cases(mutant.path)]
    return list(dict.fromkeys(tests)) + (by_imports(mutant.path) if len(found) < FEW else [])


@cache
def of_module(path: str) -> list[tuple[int, float, str]]:
    """Return the tests of all of a module's functions."""
    return sorted({test for name in executed() if name.startswith(f"{path}:") for test in executed()[name]})


def chosen(tests: Iterable[tuple[int, float, str]], seconds: float) -> list[str]:
    """Choose the most specific tests, up to a total time."""
    found, total = list[str](), 0.0
    for _, each, test in sorted(tests):
        if (total + each <= seconds or not found) and len(found) < MOST_TESTS:
            found.append(test)
            total += each
    return found


@cache
def list_sampled_cases(path: str) -> list[str]:
    """List the cases of a module's own test file that the map lacks; that of a package serves its modules, too."""
    place, mapped = Path(path.removeprefix("localllm/")).with_suffix(""), {test for test, _, _ in recorded(MAP)}
    for each in (place, *place.parents[:-1]):
        own = f"tests/unit/{each.parent.as_posix()}/test_{each.name}.py::"
        if cases := sorted(test for test in collected() if test.startswith(own)):
            return [test for test in cases if test not in mapped][:MOST_CASES]
    return []


@cache
def list_family_cases(path: str) -> list[str]:
    """List test cases of the models and checkpoints of a family's file, sampled ones too, of all tests alike."""
    if not path.startswith(FAMILIES):
        return []
    names = "|".join(map(re.escape, sorted(list_family_names(path))))
    is_case = re.compile(rf"({'|'.join(FAMILY_TESTS)}).*\[(.*-)?({names})(-.*)?\]")
    by_function = defaultdict[str, list[str]](list)
    for test in sorted(collected(), key=lambda test: (test.count("-"), test)):
        if names and is_case.fullmatch(test):
            by_function[test.partition("[")[0]].append(test)
    rounds = zip_longest(*(by_function[function] for function in sorted(by_function)))
    return [test for cases in rounds for test in cases if test][:MOST_CASES]


def list_family_names(path: str) -> set[str]:
    """List the declared models (tests/support/models) and recorded checkpoints that a family's file is for."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from models import DECLARATIONS, ENCODERS

    from localllm.arch import ARCHITECTURES
    from localllm.convert.records import load_records, resolve_record

    classes, archs, stem = set[str](), set[str](), Path(path).stem
    if path.startswith(FAMILIES[0]):
        classes = set(re.findall(r"\w+", (ROOT / path).read_text("utf-8"))) & load_records().keys()
        archs = {arch for arch, module in ARCHITECTURES.items() if module == stem}
    else:
        classes = {name for name in load_records() if f"@{stem}." in str(resolve_record(name))}
    checkpoints = json.loads((ROOT / "tests" / "goldens" / "checkpoints.json").read_text("utf-8"))
    declared = {name for name, declaration in (DECLARATIONS | ENCODERS).items() if declaration.arch in archs}
    return declared | {name for name, facts in checkpoints.items() if classes & {*facts["config"]["architectures"]}}


@cache
def imports_of(path: str) -> frozenset[str]:
    """Return the files that a file imports, from anywhere within it, and those of the commands that a test names."""
    names = set[str]()
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and path.startswith("tests/") and node.value in COMMANDS:
            names.add(f"localllm.cli.commands.{COMMANDS[node.value]}")
    found = set[str]()
    for name in names:
        place = re.sub(r"^localllm/quant(?=/|$)", "quant", name.replace(".", "/"))
        found |= {
            known
            for known in (f"{place}.py", f"{place}/__init__.py", f"tests/support/{place}.py")
            if (ROOT / known).exists()
        }
    return frozenset(found)


@cache
def by_imports(path: str) -> list[str]:
    """Return the test files whose imports reach a module in the fewest steps."""
    steps = dict[int, list[str]]()
    for test in sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")):
        if (distance := distance_to(test, path)) is not None:
            steps.setdefault(distance, []).append(test)
    return steps[min(steps)][:FILES_BY_IMPORT] if steps else []


def distance_to(test: str, path: str) -> int | None:
    """Return how many imports lead from a test to a module."""
    known, waiting = {test}, deque([(test, 0)])
    while waiting:
        file, steps = waiting.popleft()
        if file == path:
            return steps
        waiting += [(each, steps + 1) for each in imports_of(file) - known]
        known |= imports_of(file)
    return None


# ---- running --------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """Return a copy of the tree as it is now, with the shared folder beside it, if there is one."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    compile_all(tree)
    return tree


def compile_all(tree: Path) -> None:
    """Compile all modules and tests of a copy to bytecode, which takes half of the time of a quick test."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    subprocess.run([sys.executable, "-m", "compileall", "-q", "localllm", "quant"], cwd=tree, env=environment)
    subprocess.run(command, cwd=tree, env=environment | {"PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL)


def outcome(tree: Path, mutant: Mutant, tests: Sequence[str], limit: float) -> str:
    """Run tests on a fault and return the outcome: noticed, survived, untested, or hung, which is noticed, too.

    A test that fails without it as well has noticed nothing, and is left out.
    """
    source, left = (tree / mutant.path).read_bytes(), list(tests)
    while True:
        try:
            (tree / mutant.path).write_bytes(mutant.fault.applied(source))
            became, failed = tried(tree, left, limit)
        finally:
            (tree / mutant.path).write_bytes(source)
        if failed not in left or is_sound(tree, failed, limit):
            return became
        left.remove(failed)


sound = dict[str, bool]()


def is_sound(tree: Path, test: str, limit: float) -> bool:
    """Return whether a test passes without a fault."""
    if test not in sound:
        sound[test] = tried(tree, [test], limit)[0] == "survived"
    return sound[test]


def tried(tree: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Return the outcome, and the failed test."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--commit", "0"]
    if not tests:
        return "untested", ""
    process = subprocess.Popen(
        [*command, *tests], cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return "hung", ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = [line.partition(" ") for line in said.splitlines()]
    failed = next((rest for word, _, rest in lines if word in ("FAILED", "ERROR")), "")
    became = {0: "survived", UNTESTED: "untested"}.get(process.returncode, "noticed")
    return became, next((test for test in tests if failed == test or failed.startswith(f"{test} - ")), "")


def try_all(
    mutants: Iterable[Mutant], tests: Callable[[Mutant], Sequence[str]], jobs: int, limit: float
) -> Iterator[tuple[Mutant, str]]:
    """Yield each fault with its outcome, as soon as it is known."""
    waiting, results = Queue[Mutant](), Queue[tuple[Mutant, str] | None]()
    for mutant in mutants:
        waiting.put(mutant)

    def work(folder: Path) -> None:
        tree = copied(folder)
        try:
            while True:
                mutant = waiting.get_nowait()
                results.put((mutant, outcome(tree, mutant, tests(mutant), limit)))
        except Empty:
            results.put(None)

    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        folders = [Path(temporary, str(number)) for number in range(jobs)]
        threads = [threading.Thread(target=work, args=(folder,), daemon=True) for folder in folders]
        for thread in threads:
            thread.start()
        ended = 0
        while ended < jobs:
            if result := results.get():
                yield result
            else:
                ended += 1


def report(results: Iterable[tuple[Mutant, str]]) -> None:
    """Print survivors as they are found, then the share that was noticed."""
    counts = defaultdict[str, int](int)
    for mutant, became in results:
        counts[became] += 1
        if became in ("survived", "untested"):
            print(f"{became}: {mutant}", flush=True)
        print(f"\r{sum(counts.values())}: {dict(counts)}", end="", file=sys.stderr, flush=True)
    total, noticed = sum(counts.values()), counts["noticed"] + counts["hung"]
    print(f"\n{noticed} of {total} faults were noticed: {noticed / max(total, 1):.0%} {dict(counts)}")


def make_map(arguments: Sequence[str]) -> int:
    """Run tests in a copy of the tree and record what each executes; tests with a record are skipped."""
    MAP.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        tree = copied(Path(temporary))
        (tree / "sitecustomize.py").write_text(SITE.format(scripts=str(tree / "scripts" / "tools")))
        environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'scripts' / 'tools'}", "EXECUTED": str(MAP)}
        command = [sys.executable, "-m", "pytest", "-p", "coverage_plugin", "-p", "no:cacheprovider", "-q", *arguments]
        return subprocess.run(command, cwd=tree, env=environment).returncode


def main() -> int:
    if sys.argv[1:2] == ["map"]:
        return make_map(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "list"])
    parser.add_argument(
        "parts", nargs="*", default=PARTS, help=f"folders of localllm, quant, or files; {' '.join(PARTS)}"
    )
    parser.add_argument("--count", type=int, default=100, help="how many faults  [100]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="how many of them another call has tried  [0]")
    parser.add_argument("--at", action="append", help="PATH:FIRST-LAST: all faults that are possible there")
    parser.add_argument("--jobs", type=int, default=2, help="processes  [2]")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for each fault  [30]")
    parser.add_argument("--limit", type=float, default=180, help="seconds until tests count as hung  [180]")
    parser.add_argument("--tests", nargs="+", help="these for all faults, whatever executes them")
    given = parser.parse_intermixed_args()
    paths = modules(given.parts)
    found = (
        [each for place in given.at for each in placed(place)] if given.at else drawn(paths, given.count, given.seed)
    )
    left = islice(found, given.skip, None)
    if given.action == "list":
        print(*left, sep="\n")
        return 0
    report(try_all(left, lambda mutant: given.tests or tests_of(mutant, given.seconds), given.jobs, given.limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
