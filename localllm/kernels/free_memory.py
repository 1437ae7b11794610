"""How much memory there is for this process."""

import re
import sys
from pathlib import Path

from localllm.kernels.system import system_number

CONTROL_GROUP = "/sys/fs/cgroup/memory"


def available_memory() -> int:
    """Bytes that can be had, by the system and the control group's limit; sys.maxsize if nobody tells."""
    if sys.platform == "darwin":  # the level is the percentage that is not in use
        return system_number("hw.memsize") * system_number("kern.memorystatus_level") // 100 or sys.maxsize
    system = number_after("MemAvailable:", "/proc/meminfo")
    limit, used = number_after("", f"{CONTROL_GROUP}.max"), number_after("anon", f"{CONTROL_GROUP}.stat")
    group = sys.maxsize if limit is None or used is None else max(0, limit - used)
    return min(sys.maxsize if system is None else 1024 * system, group)


def number_after(name: str, path: str) -> int | None:
    """What a small system file says behind a name at the beginning of a line, None if it does not."""
    try:
        found = re.search(rf"^{name} *(\d+)", Path(path).read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def address_limit() -> int:
    """The most bytes of address space that this process may have (`ulimit -v`), sys.maxsize if nobody set a limit."""
    try:
        import resource
    except ImportError:  # another system
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def address_room() -> int:
    """What `ulimit -v` leaves of its bytes to this process, sys.maxsize if nobody set a limit."""
    if (limit := address_limit()) == sys.maxsize:
        return limit
    return limit - 1024 * (number_after("VmSize:\t", "/proc/self/status") or 0)
