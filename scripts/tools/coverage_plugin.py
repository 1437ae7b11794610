"""A pytest plugin that records which functions of localllm each test executes, and how long the test takes.

    PYTHONPATH=scripts/tools EXECUTED=FOLDER python -m pytest -p coverage_plugin ...

Each process writes a file of JSON lines to FOLDER: [test, seconds, ["localllm/engine/sequence.py:Sequence.fork", ...]].
For processes that a test starts, call_tracer.py writes the functions, without seconds. Compiled functions are not seen,
and failed tests are left out. Tests that have a record in FOLDER are not run again, so that an interrupted run can
resume.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest
from call_tracer import OURS, name_of

seen, failed = set[CodeType](), set[str]()


def see(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        seen.add(frame.f_code)


def recorded(folder: Path) -> list[tuple[str, float, set[str]]]:
    """Read a folder's records: (test, seconds, names of functions); skip last lines that were cut off."""
    times, names = dict[str, float](), defaultdict[str, set[str]](set)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                test, seconds, found = json.loads(line)
                names[test].update(found)
                times |= {test: seconds} if seconds else {}
    return [(test, seconds, names[test]) for test, seconds in times.items()]


@pytest.hookimpl(trylast=True)  # what others leave out is not counted here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = {test for test, _, _ in recorded(Path(os.environ["EXECUTED"]))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    seen.clear()
    threading.setprofile(see)
    sys.setprofile(see)
    start = seconds()
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if item.nodeid not in failed:
            write(item.nodeid, max(seconds() - start, 1e-3))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed.add(report.nodeid)


def seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def write(test: str, spent: float) -> None:
    names = sorted({name_of(code) for code in seen.copy() if code.co_filename.startswith(OURS)})
    with open(Path(os.environ["EXECUTED"], f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        print(json.dumps([test, round(spent, 3), names]), file=file)
