"""Kill processes that write sessions, and check that no turn is lost.

    python scripts/fuzz/kill_sessions.py [200]

Each process reports each turn that it has written, until it is killed. The file must then have exactly the reported
turns, to the byte, and at most one more. Some turns replace the file, as /undo does. Exits with 1 if a turn is lost.
"""

import os
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from localllm.services.sessions import SessionFile, get_path, read_session


def turn(number: int) -> list[dict[str, str]]:
    """Return the messages of a turn; some are long."""
    text = f"Turn {number}: über 狐 " * (1 + number * 7 % 300)
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": text}]


def turns(count: int) -> list[dict[str, str]]:
    return [message for number in range(count) for message in turn(number)]


def write(name: str, first: int) -> None:
    """Write turns from `first` on and report each on stdout once written; every fifth replaces another one."""
    with SessionFile(name) as file:
        for number in range(first, sys.maxsize):
            if number % 5 == 4:
                file.write([*turns(number), *turn(number + 1000)])
            file.write(turns(number + 1))
            os.write(1, b"%8d" % (number + 1))


def kill_one(name: str, first: int, count: int, seconds: float) -> tuple[int, int]:
    """Kill a process after some turns and a delay; return how many turns it reported, and how many the file has."""
    process = subprocess.Popen([sys.executable, __file__, "write", name, str(first)], stdout=subprocess.PIPE)
    assert process.stdout
    data = process.stdout.read(8 * count)
    assert len(data) == 8 * count, "a process ended that nobody killed"
    time.sleep(seconds)
    process.kill()
    data += process.stdout.read()
    process.wait()
    written = int(data[-8:]) if data else first
    if not get_path(name).exists():
        assert written == 0, f"{written} turns are lost with the file"
        return 0, 0
    messages = read_session(name).messages
    whole = [*turns(written), *turn(written + 1000)]
    assert messages[: 2 * written] == turns(written), f"something of {written} turns is lost"
    assert messages in (turns(written), turns(written + 1), whole), "there is what nobody has said"
    with SessionFile(name) as file:
        file.write(turns(written))
    return written, len(messages) // 2


def main(count: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        first = further = total = 0
        for number in range(count):
            name = f"session {number // 20}"
            first = 0 if number % 20 == 0 else first
            before = first
            first, found = kill_one(name, first, random.randint(0, 2), random.uniform(0, 0.01))
            total, further = total + first - before, further + (found > first)
        print(f"{count} processes killed, none of {total} turns lost; {further} had written a turn more than they told")


if __name__ == "__main__" and sys.argv[1:2] == ["write"]:
    write(sys.argv[2], int(sys.argv[3]))
elif __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 200)
