"""Let parallel workers compile each test module once, and collect without garbage collection.

In a fresh clone Python compiles 90,000 lines of tests, and pytest rewrites their assertions: 22 s of each worker, as
all meet the same module at the same time. So each starts with its own share, and finds the others compiled. A plugin
of pytest, which conftest.py registers.
"""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import ROOT


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector, and freeze the million objects that stay."""
    gc.disable()
    try:
        import_tests(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def import_tests(config: pytest.Config) -> None:
    """Import the test modules of the tested folders if this process is one of several workers."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    paths = sorted(path for argument in config.args for path in Path(argument).absolute().rglob("test_*.py"))
    for path in own_part_first(paths, int(worker["workerid"].removeprefix("gw")), worker["workercount"]):
        try:
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        except (Exception, pytest.skip.Exception):
            continue  # pytest meets it again, and reports it


def own_part_first(items: list[Path], worker: int, workers: int) -> list[Path]:
    begin = len(items) * worker // workers
    return items[begin:] + items[:begin]
