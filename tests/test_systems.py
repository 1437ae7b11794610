"""What differs between systems stands in localllm/system, one file for each concern: no other module asks."""

import ast
import re

import pytest
from test_layers import SOURCES

CONCERNS = {"cpu", "files", "memory", "processes", "terminal"}
# Modules that a system lacks, and questions about which it is. `signal` and `mmap` are everywhere; some names are not.
MODULES = {"fcntl", "grp", "msvcrt", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "winreg", "_winapi"}
NAMES = re.compile(
    r"sys\.(platform|getwindowsversion)|os\.(name|uname)|platform\.(system|machine|uname|platform|release|processor)"
    r"|ctypes\.(windll|WinDLL|WinError|get_last_error|CDLL)|os\.(sched_\w+|p(read|write)v?|fork|get[e]?[ug]id|umask|link"
    r"|symlink|setpriority|nice|mkfifo|sysconf|statvfs|O_(CLOEXEC|NOFOLLOW|TMPFILE|BINARY|DIRECTORY|DIRECT)|startfile"
    r"|fsync|register_at_fork|W[A-Z]+|set_blocking)|mmap\.(MAP_|PROT_|MADV_)\w+|mmap\.PAGESIZE"
    r"|signal\.(SIG(BUS|XCPU|BREAK|WINCH|TSTP|CONT|HUP|PIPE|QUIT|USR[12])|pthread_kill|setitimer|alarm|siginterrupt)"
    r"|asyncio\.\w*Policy"
)
PLACES = re.compile(r"/proc/|/sys/|/dev/(fd|shm|tty)|XDG_|APPDATA|Library/")
# By the beginning of a module's name: what it may name, and why.
EXCEPTIONS: dict[str, tuple[str, str]] = {
    "localllm.server.listening": (r"os\.umask", "a Unix socket is made with the permissions of its user alone"),
    "localllm.services.tools.commands": ("APPDATA", "a variable that a command keeps"),
    "localllm.services.tools.confined": (".", "a script for Linux alone, which imports nothing"),
    "localllm.text.trial": (r"signal\.SIGKILL", "it ends the child that it has forked"),
}


def strangers(module: str, source: str) -> list[str]:
    """Where a module asks which system it is, or uses what some lack."""
    found, tree = [], ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES:
            names = [node.module or ""]
        elif isinstance(node, ast.Attribute) and NAMES.fullmatch(ast.unparse(node)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if PLACES.search(node.value) and id(node) not in texts else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            about = ast.unparse(node.args[0])
            names = [ast.unparse(node)] if about in ("os", "mmap", "signal", "sys", "fcntl") else []
        allowed, _ = EXCEPTIONS.get(module, ("(?!)", ""))
        found += [f"{module} line {node.lineno}: {name}" for name in names if not re.search(allowed, name)]
    return found


def test_nothing_else_asks_which_system_it_is():
    others = {module: source for module, source in SOURCES.items() if not module.startswith("localllm.system.")}
    assert [line for module, source in others.items() for line in strangers(module, source)] == []


def test_one_file_for_each_concern():
    rooms = {module.rpartition(".")[2] for module in SOURCES if module.startswith("localllm.system.")}
    assert rooms == CONCERNS


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl",
        "def f():\n    from msvcrt import locking",
        "import sys\nif sys.platform == 'win32': pass",
        "import os\nfd = os.open('x', os.O_RDONLY | os.O_CLOEXEC)",
        "text = open('/proc/meminfo').read()",
        "import os\nif hasattr(os, 'fork'): pass",
        "import mmap\nflags = mmap.MAP_PRIVATE",
        "import ctypes\nlibc = ctypes.CDLL(None)",
    ],
)
def test_a_question_is_seen(source: str):
    assert len(strangers("localllm.somewhere", source)) == 1
