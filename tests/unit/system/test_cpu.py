"""Test cores, quotas, names and features of processors, with stand-ins for other systems."""

import platform
import struct
import sys
from typing import Any

import pytest

from localllm.system import cpu


def record(kind: int, *masks: tuple[int, int], relation: int = cpu.CORES) -> bytes:
    """Return Windows' record of a core; masks: its processors, each with its group."""
    size = 32 + 16 * len(masks)
    groups = b"".join(struct.pack("<QH6x", mask, group) for mask, group in masks)
    return struct.pack("<IIBB20xH", relation, size, 1, kind, len(masks)) + groups


def test_records_of_windows_cores_are_read():
    """Read two fast cores of two processors each and two slow ones; skip records of other types."""
    content = record(1, (0b11, 0)) + record(9, (0b11, 0), relation=3) + record(1, (0b1100, 0)) + record(0, (0b10000,
    0)) + record(
        0, (0b100000, 0))  # fmt: skip
    assert [*cpu.iter_core_records(content)] == [(1, [0b11]), (1, [0b1100]), (0, [0b10000]), (0, [0b100000])]
    other = record(1, (1, 1), (2, 0))
    assert [*cpu.iter_core_records(other)] == [(1, [2])]  # of another group nobody can say it in one number


@pytest.mark.parametrize(("quota", "cores", "processors"), [(1e6, 4, 8), (2.9, 2, 2), (6.0, 4, 6), (0.5, 1, 1)])
def test_a_quota_limits_cores_and_processors(
    quota: float, cores: int, processors: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu, "read_cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu, "count_physical_cores", lambda: 4)
    monkeypatch.setattr(cpu, "count_affinity_processors", lambda: 8)
    assert (cpu.count_usable_cores(), cpu.count_logical_cores()) == (cores, processors)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says it in files")
def test_cores_of_linux_are_counted_within_the_affinity(monkeypatch: pytest.MonkeyPatch):
    siblings = {
        f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 3},{n % 3 + 3}" for n in range(6)
    }
    monkeypatch.setattr(cpu.os, "sched_getaffinity", {0: {0, 1, 3}}.__getitem__)  # 0: this process
    monkeypatch.setattr(cpu, "read_text", lambda path: siblings.get(path, ""))
    assert (cpu.count_physical_cores(), cpu.count_affinity_processors()) == (2, 3)  # 0 and 3 are one core
    monkeypatch.setattr(cpu, "read_text", lambda path: "")
    assert cpu.count_physical_cores() == 3


def test_the_processor_name_is_read_on_each_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    cpuinfo = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: A : B\n\nmodel name\t: C"
    monkeypatch.setattr(cpu, "read_text", lambda path: cpuinfo)
    assert (
        cpu.get_processor_name() == "A : B"
        and cpu.get_object_triple("x86_64-unknown-linux-gnu") == "x86_64-unknown-linux-gnu"
    )
    monkeypatch.setattr(cpu.sys, "platform", "win32")
    monkeypatch.setattr(cpu, "read_registry", lambda name: f" {name} ")
    assert cpu.get_processor_name() == "ProcessorNameString"
    monkeypatch.setattr(cpu, "read_registry", lambda name: "")
    assert cpu.get_processor_name() == platform.machine()
    for triple in ("x86_64-pc-windows-msvc", "x86_64-pc-windows-msvc-elf"):
        assert cpu.get_object_triple(triple) == "x86_64-pc-windows-msvc-elf"


@pytest.mark.parametrize(("words", "features"), [
    ({16: 1 << 20, 26: 1 << 13}, ["neon", "dotprod", "i8mm"]), ({16: ~(1 << 20), 26: 1 << 13}, ["neon", "i8mm"]),
    ({}, ["neon"]),
])  # fmt: skip
def test_arm_features_are_read_on_each_system(
    words: dict[int, int], features: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    monkeypatch.setattr(cpu, "read_auxiliary_value", lambda word: words.get(word, 0))
    assert cpu.read_arm_features() == features
    for system, name, known in (("darwin", "read_sysctl", cpu.MACOS), ("win32", "has_feature", cpu.WINDOWS)):
        there = {known[feature] for feature in features[1:]}
        monkeypatch.setattr(cpu.sys, "platform", system)
        monkeypatch.setattr(cpu, name, lambda asked, there=there: int(asked in there))
        assert cpu.read_arm_features() == features


@pytest.mark.parametrize(
    ("machine", "is_arm"), [("aarch64", True), ("ARM64", True), ("x86_64", False), ("armv7l", False)]
)
def test_arm64_machines_are_recognized(machine: str, is_arm: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    assert cpu.is_arm() == is_arm


def test_a_processor_is_identified_by_its_first_entry(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    lines = [f"{name.decode()}\t: {n}" for n, name in enumerate(cpu.IDENTITY)]
    path = tmp_path / "cpuinfo"

    def identify(text: str) -> bytes | None:
        path.write_text(text)
        return cpu.get_processor_key(str(path))

    first = "\n".join(["processor\t: 0", *lines, "cpu MHz\t: 99"])
    assert identify(f"{first}\n\nprocessor\t: 1\n") == "\n".join(lines).encode()
    assert identify(first) is None  # cut off, perhaps
    assert identify("\n".join(lines[1:]) + "\n\n") is None and cpu.get_processor_key(str(tmp_path / "none")) is None


@pytest.mark.parametrize(("known", "count"), [(None, 1), (1, 1), (6, 6)])
def test_cores_are_counted_with_little_information(known: int | None, count: int, monkeypatch: pytest.MonkeyPatch):
    """Cover several processor groups of Windows, and systems without affinity."""
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: known)
    monkeypatch.setattr(cpu, "read_windows_cores", lambda: b"")
    with monkeypatch.context() as patch:
        patch.setattr(cpu.sys, "platform", "win32")
        for affinity, processors in ((0b1011, 3), (0, count)):
            patch.setattr(cpu, "read_windows_affinity", lambda affinity=affinity: affinity)
            assert (cpu.count_affinity_processors(), cpu.count_physical_cores()) == (processors, count)
        patch.setattr(
            cpu, "read_windows_cores", lambda: record(1, (0b1, 0)) + record(1, (0b10, 0)) + record(0, (0b1000, 0))
        )
        patch.setattr(cpu, "read_windows_affinity", lambda: 0b1011)
        assert cpu.count_physical_cores() == 3
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    monkeypatch.delattr(cpu.os, "sched_getaffinity", raising=False)
    assert (cpu.count_affinity_processors(), cpu.count_physical_cores()) == (count, count)
