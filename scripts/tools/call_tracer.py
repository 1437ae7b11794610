"""Record which functions of localllm a process executes that a test has started, for coverage_plugin.py.

When `mutate.py map` runs the tests, a sitecustomize.py calls `begin` in every Python process.
"""

import json
import os
import sys
import threading
from types import CodeType, FrameType

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS = os.path.join(ROOT, "localllm", ""), os.path.join(ROOT, "quant", "")


def name_of(code: CodeType) -> str:
    """Return "file:function"; generators and lambdas count as the function around them."""
    name = code.co_qualname.replace(".<locals>", "") if hasattr(code, "co_qualname") else code.co_name
    kept = [part for part in name.split(".") if not part.startswith("<")]
    return f"{os.path.relpath(code.co_filename, ROOT).replace(os.sep, '/')}:{'.'.join(kept)}"


def begin() -> None:
    """Write the name of each function that is called from now on to a file, unbuffered: the process may be killed."""
    test, folder = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0], os.environ.get("EXECUTED")
    if not test or not folder:
        return
    seen = set[CodeType]()
    path = os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(OURS):
                try:
                    os.write(descriptor, (json.dumps([test, 0.0, [name_of(code)]]) + "\n").encode())
                except OSError:  # the program has closed the descriptor, or has a limit on file sizes
                    sys.setprofile(None)

    threading.setprofile(see)
    sys.setprofile(see)
