"""What Linux's control groups leave to this process: its own group, and all above it, of version 1 and 2."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = "/"  # below it are proc and what is mounted
NO_LIMIT = 1 << 60  # bytes: version 1 says "none" by a number that is larger


NO_QUOTA = 1e6  # processors


def cgroup_quota() -> float:
    """Processors' worth of time, at most; NO_QUOTA if no group has a limit."""
    limits = [read_two(folder, "cpu.max") for folder in folders("")]
    limits += [
        (number(f"{folder}/cpu.cfs_quota_us"), number(f"{folder}/cpu.cfs_period_us")) for folder in folders("cpu")
    ]
    shares = [most / period for most, period in limits if most and period and most > 0 and period > 0]
    return min(shares, default=NO_QUOTA)


def memory_left() -> int:
    """Bytes that may be used beside those in use; the system's cache of files is in nobody's way. sys.maxsize if no
    group has a limit.
    """
    left = [
        most - (number(f"{folder}/memory.stat", "anon") or 0)
        for folder in folders("")
        for name in ("memory.max", "memory.high")  # above the second one everything is slow
        if (most := number(f"{folder}/{name}")) is not None
    ]
    left += [
        most - (number(f"{folder}/memory.stat", "total_rss") or number(f"{folder}/memory.stat", "rss") or 0)
        for folder in folders("memory")
        if (most := number(f"{folder}/memory.limit_in_bytes")) is not None and most < NO_LIMIT
    ]
    return max(0, min(left, default=sys.maxsize))


def folders(controller: str) -> Iterator[str]:
    """Those of this process's group and of all above it, as far as they can be seen; "" means version 2."""
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
    """Its path among all groups; None if it is in none."""
    for line in lines("proc/self/cgroup"):
        _, names, path = (line.split(":", 2) + ["", ""])[:3]
        if names == controller == "" or (controller and controller in names.split(",")):
            return path
    return None


def mounts(controller: str) -> Iterator[tuple[str, str]]:
    """Where groups can be seen: the path of the topmost, and its folder (proc_pid_mountinfo(5))."""
    for line in lines("proc/self/mountinfo"):
        before, _, behind = line.partition(" - ")
        words, kind = before.split(), behind.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        is_meant = kind[0] == "cgroup" and controller in kind[2].split(",") if controller else kind[0] == "cgroup2"
        if is_meant:
            yield unescaped(words[3]), os.path.normpath(f"{ROOT}/{unescaped(words[4])}")


def is_below(path: str, other: str) -> bool:
    """Whether a path is another one, or in it."""
    return path == other or path.startswith(f"{other.rstrip('/')}/")


def unescaped(text: str) -> str:
    """The kernel writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def lines(path: str) -> list[str]:
    """Of a file below ROOT; none if it is not there."""
    try:
        return Path(f"{ROOT}/{path}").read_text(errors="replace").splitlines()
    except OSError:
        return []


def number(path: str, name: str = "") -> int | None:
    """What a file says, or says behind a name at the beginning of a line; None for "max", and if it is not there."""
    try:
        found = re.search(rf"^{name} *(-?\d+)\s*$", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def read_two(folder: str, name: str) -> tuple[int | None, int | None]:
    """Two numbers of a file."""
    try:
        words = Path(f"{folder}/{name}").read_text().split()
    except OSError:
        return None, None
    return (
        (int(words[0]), int(words[1])) if len(words) == 2 and all(word.isdecimal() for word in words) else (None,) * 2
    )
