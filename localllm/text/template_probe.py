"""Render an unknown template once in a separate process, under limits of the operating system.

The sandbox limits the values of a template, but not Jinja, Python's compiler and string methods. The probe stops a
template that circumvents the sandbox before it can harm this program.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from localllm.system.processes import can_fork, fork, limit_process, run_limited, was_stopped
from localllm.text.sandbox import LimitError, compile_template, render_template

SECONDS, BYTES = 2, 256 << 20  # limits: CPU seconds, and memory beyond that of the program
MAX_MESSAGE = 1 << 12  # maximum bytes read of the process's message
TIMEOUT_SECONDS = 20.0  # limit of elapsed seconds, enough for a busy computer
PROGRAM = 128 << 20  # memory of a new Python process that renders, without fork
TOO_MUCH = f"it takes more than {BYTES >> 20} MB"
NO_MEMORY = "no memory"  # message of the process if memory cannot be limited, which is not the template's fault
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hi"}
CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER], [_USER, _ANSWER] * 6 + [_USER])


def probe_template(source: str) -> str | None:
    """Return why a template exceeds the limits, or None; a template that fails otherwise is not reported.

    Raises MemoryError if this program cannot get the memory that a template may use.
    """
    if not can_fork():
        outcome, was_ended = run_limited([sys.executable, "-P", "-m", __name__], source.encode(errors="replace"),
                                  SECONDS + 1, BYTES + PROGRAM, TIMEOUT_SECONDS)  # fmt: skip
        return _explain_outcome(outcome, was_ended)
    reader, writer = os.pipe()
    child = fork()
    if not child:
        _run_probe(source, writer)
    os.close(writer)
    try:
        return _read_outcome(reader, child)
    finally:
        os.close(reader)


def _read_outcome(reader: int, child: int) -> str | None:
    """Read the message of the child, end it, and return the problem, as probe_template does."""
    outcome, status = b"", None
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while len(outcome) < MAX_MESSAGE and select.select([reader], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (piece := os.read(reader, 4096)):
                break
            outcome += piece
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return _explain_outcome(outcome, was_stopped(status))


def _explain_outcome(outcome: bytes, was_ended: bool) -> str | None:
    """Return the problem, or None, from the child's message and whether a limit ended it."""
    if outcome.startswith(b"ok"):
        return None
    if outcome == NO_MEMORY.encode():
        raise MemoryError
    if outcome:
        return outcome.decode(errors="replace")
    return f"it ran for more than {SECONDS} seconds" if was_ended else "it crashes the process that renders it"


def _run_probe(source: str, writer: int) -> NoReturn:
    """Set the limits, render the template and write the outcome to a pipe: the work of the child."""
    try:
        outcome = _render_probe(source, _set_limits)
    except BaseException:
        os._exit(1)
    try:
        os.write(writer, outcome.encode(errors="replace")[:400])
    finally:
        os._exit(0)


def _render_probe(source: str, limit: Callable[[], str]) -> str:
    """Compile and render a template; return "ok" or the problem.

    limit: sets the limits, and returns the message for a MemoryError.
    """
    too_much = NO_MEMORY
    try:
        too_much = limit()
        template = compile_template(source)
        for conversation in CONVERSATIONS:
            _render(template, conversation)
    except LimitError as error:
        return str(error)
    except MemoryError:
        return too_much
    except Exception:
        pass  # an error of the template itself, which the program reports later
    return "ok"


def _render(template: object, conversation: list[dict[str, str]]) -> None:
    variables = {"messages": conversation, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    try:
        render_template(template, {"tools": None, "documents": None, **variables})  # type: ignore[arg-type]
    except (LimitError, MemoryError):
        raise
    except Exception:
        return


def _set_limits() -> str:
    """Limit the CPU time and memory of this process; return the message for a MemoryError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return TOO_MUCH if limit_process(SECONDS, BYTES) else NO_MEMORY


if __name__ == "__main__":  # on systems without fork
    message = _render_probe(sys.stdin.buffer.read().decode(errors="replace"), lambda: TOO_MUCH)
    os.write(1, message.encode(errors="replace")[:400])
