"""A template's first rendering, in a process of its own that the operating system limits.

The sandbox counts what a template makes, but Jinja, Python's compiler and the methods of texts are not ours: where a
stranger's template finds a way around, it ends here, before it can harm the program. A template that passes is cached
by its hash and never probed again, so that later starts lose nothing.
"""

import hashlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from localllm.errors import ModelError
from localllm.files.cache.checksummed_cache import is_known, remember
from localllm.system.processes import can_fork, fork, limit_process, run_limited, was_stopped
from localllm.text.sandbox import compile_template, render_template
from localllm.text.template_limits import LimitError

SECONDS, BYTES = 2, 256 << 20  # of the processor, and of memory beyond what the program has
PATIENCE = 20.0  # seconds of the clock, on a computer that is busy with other things
PROGRAM = 128 << 20  # bytes of a Python that renders, where it is not forked
TOO_MUCH = f"it takes over {BYTES >> 20} MB"
NO_MEMORY = "no memory"  # what the process says where the template is not to blame
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hi"}
CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER], [_USER, _ANSWER] * 6 + [_USER])


def require_safe_template(source: str) -> None:
    """Raise ModelError for a template that takes too much time or memory.

    One that only fails passes: it reports that itself. Raises MemoryError where this program itself may not take what a
    template may.
    """
    mark = hashlib.sha256(source.encode(errors="replace")).hexdigest()
    if is_known("template", mark):
        return
    if (problem := probe_template(source)) is not None:
        raise ModelError(f"the chat template was stopped: {problem}")
    remember("template", mark)


def probe_template(source: str) -> str | None:
    """Return the problem of a template; None if it keeps to the limits.

    Raises MemoryError, see require_safe_template.
    """
    if not can_fork():
        outcome, was_ended = run_limited([sys.executable, "-P", "-m", __name__], source.encode(errors="replace"),
                                  SECONDS + 1, BYTES + PROGRAM, PATIENCE)  # fmt: skip
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
    """Read the child's message, or derive it from how it ended."""
    outcome, status = b"", None
    deadline = time.monotonic() + PATIENCE
    try:
        while select.select([reader], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (piece := os.read(reader, 4096)):
                break
            outcome += piece
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return _explain_outcome(outcome, was_stopped(status))


def _explain_outcome(outcome: bytes, was_ended: bool) -> str | None:
    """Derive the problem from the child's message and whether the system ended it."""
    if outcome.startswith(b"ok"):
        return None
    if outcome == NO_MEMORY.encode():
        raise MemoryError
    if outcome:
        return outcome.decode(errors="replace")
    return f"it ran for over {SECONDS} seconds" if was_ended else "it ends the program that renders it"


def _run_probe(source: str, writer: int) -> NoReturn:
    """Run the probe in the child, with limits, and write the outcome."""
    try:
        outcome = _render_probe(source, _set_limits)
    except BaseException:
        os._exit(1)
    try:
        os.write(writer, outcome.encode(errors="replace")[:400])
    finally:
        os._exit(0)


def _render_probe(source: str, limit: Callable[[], str]) -> str:
    """Compile and render; return "ok", or what is wrong; `limit` returns the message for lack of memory."""
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
        pass  # an error of its own, which the program will find too
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
    """Limit this process's CPU time and memory; return the message for lack of memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return TOO_MUCH if limit_process(SECONDS, BYTES) else NO_MEMORY


if __name__ == "__main__":  # where processes cannot be forked
    os.write(
        1,
        _render_probe(sys.stdin.buffer.read().decode(errors="replace"), lambda: TOO_MUCH).encode(errors="replace")[
            :400
        ],
    )
