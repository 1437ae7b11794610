"""Select the tests to run: of expensive cases those whose turn it is at this commit, or all.

Cases with `@pytest.mark.sampled` are slow, and run at about every tenth commit: the commit's hash and the case's name
decide, so that a commit always sees the same ones, and a few commits see all. `sampled("name")` goes by the value of
that parameter alone: all tests of a format take turns together, in every file, and compile its kernels once; as a
module's `pytestmark`, it means those that have the parameter. `every` sets how seldom a case has its turn, `always`
which values always run. A case given by its name, as in file.py::test[case], runs. Hypothesis takes its seed from the
commit as well.

Functions that take more than a thousandth of the time of all tests are in long_tests.txt, which
scripts/record/record_long_tests.py writes: their cases run at every tenth commit, or half as often as `sampled` says.

Tests with `@pytest.mark.real` need real models, or minutes of them, and run with --real alone.

    --all            all cases, everything at length, and hypothesis with a new seed
    --real           the tests of real models, and no others
    --commit HASH    the selection of another commit

Outside of git the sample is always the same. A plugin of pytest, which conftest.py registers.
"""

import hashlib
import secrets
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

HASH = 10  # digits of a commit's hash that count
EVERY = 10  # commits share a case, unless its marker says otherwise
LONG = frozenset(Path(__file__).with_name("long_tests.txt").read_text("utf-8").split())
chosen: pytest.Config


def everything() -> bool:
    """Return whether tests shall take all the time they can use (--all)."""
    return chosen.option.everything


def again_the_same() -> list[str]:
    """Return the arguments with which pytest selects the same tests again."""
    option = chosen.option
    seed = f"--hypothesis-seed={option.hypothesis_seed}"
    return ["--commit", option.commit, seed, *["--all"] * option.everything]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("localllm")
    group.addoption(
        "--all", dest="everything", action="store_true",
        help="run all cases, also those that most commits leave out, and hypothesis with a new seed",
    )  # fmt: skip
    group.addoption("--real", action="store_true", help="run the tests of real models, and no others")
    group.addoption("--commit", metavar="HASH", help="leave out what that commit leaves out, not HEAD")


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks for its seed
def pytest_configure(config: pytest.Config) -> None:
    """Choose commit and seed in the main process, whose options the workers get."""
    global chosen
    chosen, option = config, config.option
    config.addinivalue_line(
        "markers", "sampled(*parameters, every=10, always=()): runs at some commits; see tests/support/selection.py"
    )
    config.addinivalue_line("markers", "real: needs real models; runs with --real alone")
    option.commit = (option.commit or head())[:HASH]
    if option.hypothesis_seed is None:
        option.hypothesis_seed = str(secrets.randbits(32) if option.everything else number(option.commit))
    settings.register_profile("tests", deadline=None, database=None)
    settings.load_profile("tests")


def head() -> str:
    """Return the commit's hash; zeros outside of git."""
    root = Path(__file__).parents[2]
    try:
        git = ["git", "-C", root, "rev-parse", "--show-prefix", "HEAD"]
        prefix, commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\n")[:2]
    except (OSError, subprocess.CalledProcessError):
        return "0" * HASH
    return "0" * HASH if prefix else commit  # a copy within another project's repository


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def has_turn(case: str, commit: str, every: int) -> bool:
    return number(f"{commit} {case}") % every == 0


def turn(item: pytest.Item) -> tuple[str, int] | None:
    """Return the case that takes turns, and how many commits share it; None if it always runs."""
    mark = item.get_closest_marker("sampled")
    is_long = item.nodeid.partition("[")[0] in LONG
    values = item.callspec.params if hasattr(item, "callspec") else {}
    if mark is None or not values.keys() >= set(mark.args):
        return (item.nodeid, EVERY) if is_long else None
    case = "-".join(str(values[name]) for name in mark.args) if mark.args else item.nodeid
    every = mark.kwargs.get("every", EVERY) * (1 + is_long)
    return None if case in mark.kwargs.get("always", ()) else (case, every)


def seconds(item: pytest.Item) -> int:
    """Return a test's rough processor time, 0 for a quick one."""
    mark = item.get_closest_marker("slow")
    return (*mark.args, 2)[0] if mark else 0


@pytest.hookimpl(tryfirst=True)  # before -m is heeded
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases without a turn; run the slowest first, so that no core waits for another's last test."""
    is_named = any("::" in argument for argument in config.args)
    if config.option.real or not is_named:
        others = {item for item in items if bool(item.get_closest_marker("real")) != config.option.real}
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]
    turns = {item: found for item in items if (found := turn(item))}
    for item in turns:
        item.add_marker("slow")
    if not (config.option.everything or is_named):
        left_out = {item for item, (case, every) in turns.items() if not has_turn(case, config.option.commit, every)}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
        config.stash[LEFT_OUT] = len(left_out)
    items.sort(key=seconds, reverse=True)


LEFT_OUT = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's results to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    option = config.option
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} cases were left out: it is not their turn at commit {option.commit}. --all runs them, too."
        )
    terminalreporter.write_line(f"Again the same: {' '.join(again_the_same())}")
