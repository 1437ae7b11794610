"""Test import_once.py, by which workers share the compilation of test modules."""

from pathlib import Path

import import_once


def test_each_worker_imports_its_own_share_first():
    paths = [Path(f"test_{number}.py") for number in range(8)]
    orders = [import_once.own_part_first(paths, worker, 3) for worker in range(3)]
    assert all(sorted(order) == paths for order in orders)
    assert orders[0][:2] + orders[1][:3] + orders[2][:3] == paths
