"""Confine a process and its children to some folders and the installed programs, with Linux's Landlock.

See https://docs.kernel.org/userspace-api/landlock.html. As a script, `confined.py FOLDER... -- COMMAND`, this confines
itself and executes the command. It imports no other module of localllm, and runs under `python -I -S`.
"""

import ctypes
import os
import sys

CREATE, ADD, RESTRICT = 444, 445, 446  # system call numbers, the same on all processors
NO_NEW_PRIVILEGES, PATH_BENEATH = 38, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READING = EXECUTE | READ_FILE | READ_DIR
RIGHTS = {1: 13, 2: 14, 3: 15}  # count of access rights by Landlock's version; 16 from version 5 on
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # rights that apply to files
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/nix", "/proc", "/sys", "/run/systemd/resolve")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


class Ruleset(ctypes.Structure):
    _fields_ = (("handled", ctypes.c_uint64),)


class PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def get_landlock_version() -> int:
    if sys.platform != "linux":
        return 0
    result: int = max(0, ctypes.CDLL(None).syscall(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    return result


def confine_process(folders: list[str]) -> None:
    library, landlock = ctypes.CDLL(None, use_errno=True), get_landlock_version()
    all_rights = (1 << RIGHTS.get(landlock, 15 if landlock < 5 else 16)) - 1
    rules = Ruleset(all_rights)
    ruleset = check_result(library.syscall(CREATE, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0))
    paths = [path for path in os.environ.get("PATH", "").split(":") if os.path.isabs(path)]
    python = os.path.dirname(sys.executable)  # a virtual environment may have its own copy
    allowed = dict.fromkeys((*PROGRAMS, *paths, python, sys.prefix, sys.base_prefix), READING)
    allowed |= dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | dict.fromkeys(folders, all_rights)
    for path, rights in allowed.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # the folder does not exist
            continue
        rights &= all_rights if os.path.isdir(path) else all_rights & OF_FILES
        beneath = PathBeneath(rights, descriptor)
        check_result(library.syscall(ADD, ruleset, PATH_BENEATH, ctypes.byref(beneath), 0))
        os.close(descriptor)
    check_result(library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    check_result(library.syscall(RESTRICT, ruleset, 0))


def check_result(result: int) -> int:
    """Return a system call's result. Raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    end = sys.argv.index("--")
    confine_process(sys.argv[1:end])
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
