"""Test which rows of which tables the system is asked for."""

import mmap

import numpy as np
import pytest

from localllm.engine.cpu import row_prefetch
from localllm.engine.cpu.row_prefetch import RowPrefetch
from localllm.engine.lower.tape import KernelStep
from localllm.system.memory import PAGE

ROW_BYTES, ROWS, OFFSET = 3 * PAGE // 2, 1000, PAGE + 64


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(row_prefetch, "request_pages", lambda data, start, size: asked.append((start, size)))
    return asked


@pytest.fixture
def table(tmp_path) -> np.ndarray:
    """A table in a mapped file, uint8 [ROWS, ROW_BYTES]."""
    path = tmp_path / "table"
    path.write_bytes(bytes(OFFSET + ROWS * ROW_BYTES))
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(data, np.uint8)[OFFSET:].reshape(ROWS, ROW_BYTES)


def make_step(kernel: str, weights: np.ndarray, ids: np.ndarray) -> KernelStep:
    return KernelStep(kernel, {"weights": weights, "ids": ids}, 1, None, [], [])


def test_the_pages_of_all_rows_are_requested_once(table, asked):
    ids = np.array([7, 2, 7, 999, 5], np.int64)
    prefetch = RowPrefetch([make_step("embed-Q8_0", table, ids)], ids)
    prefetch.request(4)
    expected = [(OFFSET + id * ROW_BYTES, OFFSET + (id + 1) * ROW_BYTES) for id in (2, 7, 999)]
    assert asked == [(first // PAGE * PAGE, end - first // PAGE * PAGE) for first, end in expected]
    assert prefetch.resident_bytes == 3 * ROW_BYTES
    asked.clear()
    prefetch.request(1)
    assert prefetch.resident_bytes == 3 * ROW_BYTES  # the row of token 7 again
    assert [start // PAGE * PAGE for start, _ in asked] == [(OFFSET + 7 * ROW_BYTES) // PAGE * PAGE]


def test_other_tables_are_left_to_the_system(table, asked):
    ids, computed = np.zeros(3, np.int64), np.zeros(3, np.int64)
    steps = [
        make_step("embed-F32", table, computed),
        make_step("embed-F32", np.zeros_like(table), ids),
        make_step("embed-F32", table[:5], ids),
        make_step("linear-F32", table, ids),
    ]
    RowPrefetch(steps, ids).request(3)
    assert asked == []


def test_rows_of_a_real_file_can_be_requested(table):
    ids = np.array([1, 900], np.int64)
    RowPrefetch([make_step("embed-F32", table, ids)], ids).request(2)
    assert not table[900].any()
