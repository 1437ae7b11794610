"""Limits on this process from Linux control groups (cgroups v1 and v2): its own group's and all parents'."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = "/"  # parent of proc and of the mount points
NO_LIMIT = 1 << 60  # bytes; v1 reports "no limit" as a value above this
NO_QUOTA = 1e6  # processors


def read_cpu_quota() -> float:
    """Return the CPU quota in processors; NO_QUOTA without a limit."""
    limits = [read_integer_pair(folder, "cpu.max") for folder in iter_group_folders("")]
    limits += [
        (read_integer(f"{folder}/cpu.cfs_quota_us"), read_integer(f"{folder}/cpu.cfs_period_us"))
        for folder in iter_group_folders("cpu")
    ]
    shares = [quota / period for quota, period in limits if quota and period and quota > 0 and period > 0]
    return min(shares, default=NO_QUOTA)


def read_memory_left() -> int:
    """Return the bytes below the lowest memory limit, not counting the file cache; sys.maxsize without a limit."""
    remaining = [
        limit - read_used_memory(folder, "memory.current", "", "anon")
        for folder in iter_group_folders("")
        for name in ("memory.max", "memory.high")  # above memory.high the kernel slows the process down
        if (limit := read_integer(f"{folder}/{name}")) is not None
    ]
    remaining += [
        limit - read_used_memory(folder, "memory.usage_in_bytes", "total_", "total_rss")
        for folder in iter_group_folders("memory")
        if (limit := read_integer(f"{folder}/memory.limit_in_bytes")) is not None and limit < NO_LIMIT
    ]
    return max(0, min(remaining, default=sys.maxsize))


def read_used_memory(folder: str, current: str, prefix: str, anonymous: str) -> int:
    """Return the bytes that a group uses without its file cache.

    current: file with the usage, which is exact.  prefix: of names in memory.stat, whose values may be two seconds old.
    anonymous: name of the memory there that is not cache.
    """
    stat = f"{folder}/memory.stat"
    cache = sum(read_integer(stat, f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive"))
    return max(read_integer(stat, anonymous) or 0, (read_integer(f"{folder}/{current}") or 0) - cache)


def iter_group_folders(controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its visible parents; controller: of v1, "" for v2."""
    group = read_own_group(controller)
    if group is None:
        return
    for root, place in iter_mounts(controller):
        is_mounted = is_below(group, root) and ".." not in group.split("/")
        inner = group.removeprefix(root.rstrip("/")) if is_mounted else ""
        folder = os.path.normpath(f"{place}/{inner}")
        while is_below(folder, place):  # folders above the mount point are not control groups
            yield folder
            folder = os.path.dirname(folder)
        return


def read_own_group(controller: str) -> str | None:
    """Return the path of this process's group, or None."""
    for line in read_lines("proc/self/cgroup"):
        _, names, path = (line.split(":", 2) + ["", ""])[:3]
        if names == controller == "" or (controller and controller in names.split(",")):
            return path
    return None


def iter_mounts(controller: str) -> Iterator[tuple[str, str]]:
    """Yield the mounts of this hierarchy: the group at the mount's root, and its folder (proc_pid_mountinfo(5))."""
    for line in read_lines("proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        words, kind = mount.split(), filesystem.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup" and controller in kind[2].split(",") if controller else kind[0] == "cgroup2":
            yield unescape(words[3]), os.path.normpath(f"{ROOT}/{unescape(words[4])}")


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or inside it."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def unescape(text: str) -> str:
    """Decode the kernel's escapes, such as \\040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_lines(path: str) -> list[str]:
    """Read the lines of a file below ROOT; [] if it does not exist."""
    try:
        return Path(f"{ROOT}/{path}").read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_integer(path: str, name: str = "") -> int | None:
    """Read the integer after `name` at the beginning of a line, or a file's only integer.

    Returns None for "max" or without a file.
    """
    try:
        match = re.search(rf"^{name} *(-?\d+)\s*$", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def read_integer_pair(folder: str, name: str) -> tuple[int | None, int | None]:
    """Read a file of two integers; (None, None) if it is missing or has other content, such as "max 100000"."""
    try:
        words = Path(f"{folder}/{name}").read_text().split()
    except OSError:
        return None, None
    return (int(words[0]), int(words[1])) if len(words) == 2 and "".join(words).isdecimal() else (None, None)
