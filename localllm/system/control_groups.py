"""Limits of Linux's control groups on this process: its own group and all parents, of version 1 and 2."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = "/"  # below it are proc and what is mounted
NO_LIMIT = 1 << 60  # bytes: version 1 says "none" by a number that is larger


NO_QUOTA = 1e6  # processors


def cgroup_quota() -> float:
    """Return the CPU quota in processors; NO_QUOTA if no group has a limit."""
    limits = [read_two_numbers(folder, "cpu.max") for folder in group_folders("")]
    limits += [
        (read_number(f"{folder}/cpu.cfs_quota_us"), read_number(f"{folder}/cpu.cfs_period_us"))
        for folder in group_folders("cpu")
    ]
    shares = [most / period for most, period in limits if most and period and most > 0 and period > 0]
    return min(shares, default=NO_QUOTA)


def memory_left() -> int:
    """Return how many more bytes may be used, without the file cache; sys.maxsize without a limit."""
    remaining = [
        most - (read_number(f"{folder}/memory.stat", "anon") or 0)
        for folder in group_folders("")
        for name in ("memory.max", "memory.high")  # above the second one everything is slow
        if (most := read_number(f"{folder}/{name}")) is not None
    ]
    remaining += [
        most - (read_number(f"{folder}/memory.stat", "total_rss") or read_number(f"{folder}/memory.stat", "rss") or 0)
        for folder in group_folders("memory")
        if (most := read_number(f"{folder}/memory.limit_in_bytes")) is not None and most < NO_LIMIT
    ]
    return max(0, min(remaining, default=sys.maxsize))


def group_folders(controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its parents, as far as visible; "" means version 2."""
    own = own_group(controller)
    if own is None:
        return
    for root, place in mounts(controller):
        is_seen = is_below(own, root) and ".." not in own.split("/")  # else it is outside of what is mounted here
        inner = own.removeprefix(root.rstrip("/")) if is_seen else ""
        folder = os.path.normpath(f"{place}/{inner}")
        while is_below(folder, place):  # what is above the place is no control group
            yield folder
            folder = os.path.dirname(folder)
        return


def own_group(controller: str) -> str | None:
    """Return the path of this process's group; None if it is in none."""
    for line in read_lines("proc/self/cgroup"):
        _, names, path = (line.split(":", 2) + ["", ""])[:3]
        if names == controller == "" or (controller and controller in names.split(",")):
            return path
    return None


def mounts(controller: str) -> Iterator[tuple[str, str]]:
    """Yield the mount points of control groups: the path of the topmost, and its folder (proc_pid_mountinfo(5))."""
    for line in read_lines("proc/self/mountinfo"):
        before, _, behind = line.partition(" - ")
        words, kind = before.split(), behind.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        is_meant = kind[0] == "cgroup" and controller in kind[2].split(",") if controller else kind[0] == "cgroup2"
        if is_meant:
            yield unescape(words[3]), os.path.normpath(f"{ROOT}/{unescape(words[4])}")


def is_below(path: str, other: str) -> bool:
    """Return whether a path is another one, or in it."""
    return path == other or path.startswith(f"{other.rstrip('/')}/")


def unescape(text: str) -> str:
    """Decode the kernel's escapes, such as \\040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_lines(path: str) -> list[str]:
    """Read the lines of a file below ROOT; none if there is no such file."""
    try:
        return Path(f"{ROOT}/{path}").read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_number(path: str, name: str = "") -> int | None:
    """Read a number, alone or after a name at the beginning of a line.

    None for "max", and if it is not there.
    """
    try:
        match = re.search(rf"^{name} *(-?\d+)\s*$", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def read_two_numbers(folder: str, name: str) -> tuple[int | None, int | None]:
    """Read two numbers from a file."""
    try:
        words = Path(f"{folder}/{name}").read_text().split()
    except OSError:
        return None, None
    return (
        (int(words[0]), int(words[1])) if len(words) == 2 and all(word.isdecimal() for word in words) else (None,) * 2
    )
