"""Test limits of control groups, in a folder that looks like Linux's / and in real groups."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import ROOT

from localllm.system import control_groups, cpu, memory
from localllm.system.control_groups import NO_QUOTA, read_cpu_quota, read_memory_left

TWO = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
CPU = "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "32 24 0:28 / /sys/fs/cgroup/memory rw master:9 - cgroup cgroup rw,memory"
UNLIMITED = "9223372036854771712"


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets groups, mounts and files."""
    monkeypatch.setattr(control_groups, "ROOT", str(tmp_path))

    def say(groups: str, mounts: str, files: dict[str, str]) -> None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        (tmp_path / "proc/self/mountinfo").write_text(f"23 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}\n")
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return say


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/\n", TWO, {}, NO_QUOTA),
        ("0::/\n", TWO, {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", TWO, {"cpu.max": "max 100000"}, NO_QUOTA),
        ("0::/\n", TWO, {"cpu.max": "nonsense"}, NO_QUOTA),
        ("0::/\n", TWO, {"cpu.max": "100000 0"}, NO_QUOTA),
        ("0::/a/b\n", TWO, {"a/b/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
        ("0::/a/b\n", TWO, {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b\n", TWO, {"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", TWO, {"a/b/cpu.max": "300000 100000", "a/c/cpu.max": "1000 100000"}, 3.0),
        ("0::/a\n", TWO.replace("/ /sys", "/a /sys"), {"cpu.max": "70000 100000"}, 0.7),
        ("0::/a/b\n", TWO.replace("/ /sys", "/a /sys"), {"b/cpu.max": "70000 100000"}, 0.7),
        ("0::/../x\n", TWO, {"cpu.max": "70000 100000", "../../x/cpu.max": "1 100"}, 0.7),
        ("0::/a b\n", TWO.replace("cgroup rw", "c\\040g rw"), {"../c g/a b/cpu.max": "70000 100000"}, 0.7),
        ("3:cpu,cpuacct:/u\n0::/\n", CPU, {"cpu,cpuacct/u/cpu.cfs_quota_us": "300000",
                                            "cpu,cpuacct/u/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu,cpuacct:/u/v\n", CPU, {"cpu,cpuacct/u/cpu.cfs_quota_us": "50000",
                                       "cpu,cpuacct/u/cpu.cfs_period_us": "100000",
                                       "cpu,cpuacct/u/v/cpu.cfs_quota_us": "-1",
                                       "cpu,cpuacct/u/v/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu,cpuacct:/\n", CPU, {"cpu,cpuacct/cpu.cfs_quota_us": "0",
                                    "cpu,cpuacct/cpu.cfs_period_us": "100000"}, NO_QUOTA),
        ("3:cpu,cpuacct:/\n", CPU, {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}, NO_QUOTA),
        ("3:cpu,cpuacct:/u\n0::/a\n", f"{CPU}\n{TWO.replace('cgroup rw', 'cgroup/unified rw')}",
         {"unified/a/cpu.max": "90000 100000", "cpu,cpuacct/u/cpu.cfs_quota_us": "50000",
          "cpu,cpuacct/u/cpu.cfs_period_us": "100000"}, 0.5),
        ("nonsense\n", "nonsense", {}, NO_QUOTA),
    ],
)  # fmt: skip
def test_the_cpu_quota_is_the_least_of_all_groups(
    linux, groups: str, mounts: str, files: dict[str, str], quota: float, monkeypatch: pytest.MonkeyPatch
):
    linux(groups, mounts, files)
    assert read_cpu_quota() == quota
    monkeypatch.setattr(cpu, "count_physical_cores", lambda: 8)
    monkeypatch.setattr(cpu, "count_affinity_processors", lambda: 16)
    assert cpu.count_usable_cores() == max(1, min(8, int(quota)))
    assert cpu.count_logical_cores() == max(1, min(16, int(quota)))


@pytest.mark.parametrize("limited", ["a/b", "a", ""])
def test_fit_counts_only_the_memory_that_a_group_leaves(linux, cli, tiny: str, limited: str):
    """Limit the process's group or one above it."""
    place = f"{limited}/" if limited else ""
    linux("0::/a/b\n", TWO, {f"{place}memory.max": "900000000", f"{place}memory.stat": "anon 100000000"})
    code, out, _ = cli("fit", "--json", tiny)
    facts = json.loads(out)
    assert code == 0 and facts["available_bytes"] == 800_000_000
    assert {row["fits"] for row in facts["rows"]} >= {True}
    (Path(control_groups.ROOT) / "sys/fs/cgroup" / limited / "memory.max").write_text("300000000\n")
    facts = json.loads(cli("fit", "--json", tiny)[1])
    assert facts["available_bytes"] == 200_000_000 and not any(row["fits"] for row in facts["rows"])


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "left"),
    [
        ("0::/a/b\n", TWO, {}, sys.maxsize),
        ("0::/\n", TWO, {"memory.max": "5000", "memory.stat": "file 1\nanon 3000\nanon_thp 9"}, 2000),
        ("0::/\n", TWO, {"memory.max": "5000", "memory.stat": "anon 6000"}, 0),
        ("0::/\n", TWO, {"memory.max": "0", "memory.stat": "anon 0"}, 0),
        ("0::/\n", TWO, {"memory.max": "5000", "memory.current": "4000",
                         "memory.stat": "anon 900\nactive_file 500\ninactive_file 1500"}, 3000),
        ("4:memory:/u\n", MEMORY, {"memory/u/memory.limit_in_bytes": "900", "memory/u/memory.usage_in_bytes": "800",
                                   "memory/u/memory.stat": "total_rss 3\ntotal_active_file 60\nactive_file 9"}, 160),
        ("0::/a/b\n", TWO, {"a/b/memory.max": "max", "a/memory.max": "900", "a/memory.stat": "anon 100"}, 800),
        ("0::/a/b\n", TWO, {"a/b/memory.max": "900", "a/b/memory.stat": "anon 100", "a/memory.max": "5000",
                            "a/memory.stat": "anon 4900"}, 100),
        ("0::/a\n", TWO, {"a/memory.max": "900", "a/memory.high": "500", "a/memory.stat": "anon 100"}, 400),
        ("4:memory:/u/v\n", MEMORY, {"memory/memory.limit_in_bytes": UNLIMITED,
                                     "memory/u/memory.limit_in_bytes": "900",
                                     "memory/u/memory.stat": "cache 500\nrss 50\ntotal_cache 500\ntotal_rss 300",
                                     "memory/u/v/memory.limit_in_bytes": UNLIMITED}, 600),
    ],
)  # fmt: skip
def test_the_memory_left_is_the_least_of_all_groups(
    linux, groups: str, mounts: str, files: dict[str, str], left: int, monkeypatch: pytest.MonkeyPatch
):
    linux(groups, mounts, files)
    assert read_memory_left() == left
    monkeypatch.setattr(sys, "platform", "linux")
    assert memory.get_available_memory() <= left


def test_without_control_groups_nothing_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_groups, "ROOT", str(tmp_path))
    assert (read_cpu_quota(), read_memory_left()) == (NO_QUOTA, sys.maxsize)


@pytest.fixture
def group() -> Iterator[list[tuple[Path, str]]]:
    """Make real groups below this process's, for a quota and for memory."""
    groups = []
    for controller, names in (("cpu", ["cpu"]), ("memory", ["memory"])):
        for kind in (controller, ""):
            for folder in [*control_groups.iter_group_folders(kind)][:1]:
                place = Path(folder) / f"localllm-{os.getpid()}-{controller}"
                try:
                    place.mkdir()
                except OSError:
                    continue
                groups.append((place, names[0] + (".2" if not kind else "")))
    yield groups
    for place, _ in groups:
        place.rmdir()


SHOW = "from localllm.system.cpu import count_usable_cores as c, read_cpu_quota as q; " \
       "from localllm.system.memory import get_available_memory as m; print(c(), q(), m())"  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_limits_of_real_groups_are_honoured(group: list[tuple[Path, str]]):
    limits = {
        "cpu": {"cpu.cfs_quota_us": "50000"}, "cpu.2": {"cpu.max": "50000 100000"},
        "memory": {"memory.limit_in_bytes": "900000000"}, "memory.2": {"memory.max": "900000000"},
    }  # fmt: skip
    tried = 0
    for place, kind in group:
        inner = place / "inner"
        try:
            for name, text in limits[kind].items():
                (place / name).write_text(text)
            inner.mkdir()
        except OSError:
            continue
        try:
            enter = f"echo $$ > {inner}/cgroup.procs && exec {sys.executable} -c '{SHOW}'"
            done = subprocess.run(["sh", "-c", enter], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                continue
            cores, quota, left = done.stdout.split()
            tried += 1
            assert (cores, quota) == ("1", "0.5") if kind.startswith("cpu") else 0 < int(left) <= 900_000_000
        finally:
            inner.rmdir()
    if not tried:
        pytest.skip("control groups cannot be made here")
