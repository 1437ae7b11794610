"""How many processors there are for this process."""

import os
import sys
from pathlib import Path

from localllm.kernels.system import system_number


def usable_cores() -> int:
    """Physical cores that this process may use, by its affinity and its control group's quota; at least 1."""
    return max(1, min(physical_cores(), int(cgroup_quota())))


def logical_cores() -> int:
    """The same, but two logical processors of one core count twice: for processes, not for threads that share work."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(cgroup_quota())))


def physical_cores() -> int:
    """Cores that this process may run on. Two logical processors of one core count once; on macOS, fast cores only."""
    if sys.platform == "darwin":
        return system_number("hw.perflevel0.physicalcpu") or system_number("hw.physicalcpu")
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = (f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list" for i in os.sched_getaffinity(0))
    return len({read_text(path) or path for path in siblings})


def cgroup_quota() -> float:
    """Processors' worth of time that the control group allows, infinite if it sets no limit."""
    words = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(words) != 2:  # version 1
        words = [read_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota = int(words[0]) / int(words[1])
    except (ValueError, ZeroDivisionError):
        return 1e6
    return quota if quota > 0 else 1e6


def read_text(path: str) -> str:
    """A small system file, empty if there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
