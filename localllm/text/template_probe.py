"""A template's first rendering, in a process of its own that the operating system limits.

The sandbox counts what a template makes, but Jinja, Python's compiler and the methods of texts are not ours: where a
stranger's template finds a way around, it meets its end here, before it can harm the program. A template that passes
is remembered by its hash and never tried again, so that later starts lose nothing.
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
from localllm.files.cache.validated_cache import is_known, remember
from localllm.system.processes import can_fork, fork, limit_this, limited, was_stopped
from localllm.text.sandbox import LimitError, compile_template, render_template

SECONDS, BYTES = 2, 256 << 20  # of the processor, and of memory beyond what the program has
PATIENCE = 20.0  # seconds of the clock, on a computer that is busy with other things
PROGRAM = 128 << 20  # bytes of a Python that renders, where it is not forked
TOO_MUCH = f"it takes over {BYTES >> 20} MB"
NO_MEMORY = "no memory"  # what the process says where the template is not to blame
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hi"}
CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER], [_USER, _ANSWER] * 6 + [_USER])


def require_harmless(source: str) -> None:
    """Raise ModelError for a template that takes too much. One that only fails passes: it will say why itself.

    Raises MemoryError where this program itself may not take what a template may.
    """
    mark = hashlib.sha256(source.encode(errors="replace")).hexdigest()
    if is_known("template", mark):
        return
    if (problem := tried(source)) is not None:
        raise ModelError(f"the chat template was stopped: {problem}")
    remember("template", mark)


def tried(source: str) -> str | None:
    """What is wrong with a template; None if it keeps to the limits. Raises MemoryError, see require_harmless."""
    if not can_fork():
        told, was_ended = limited([sys.executable, "-P", "-m", __name__], source.encode(errors="replace"),
                                  SECONDS + 1, BYTES + PROGRAM, PATIENCE)  # fmt: skip
        return _problem(told, was_ended)
    reader, writer = os.pipe()
    child = fork()
    if not child:
        _try(source, writer)
    os.close(writer)
    try:
        return _verdict(reader, child)
    finally:
        os.close(reader)


def _verdict(reader: int, child: int) -> str | None:
    """What the child writes, or how it ends."""
    told, status = b"", None
    deadline = time.monotonic() + PATIENCE
    try:
        while select.select([reader], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (piece := os.read(reader, 4096)):
                break
            told += piece
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return _problem(told, was_stopped(status))


def _problem(told: bytes, was_ended: bool) -> str | None:
    """As `tried`, by what the child has told and whether the system has ended it."""
    if told.startswith(b"ok"):
        return None
    if told == NO_MEMORY.encode():
        raise MemoryError
    if told:
        return told.decode(errors="replace")
    return f"it ran for over {SECONDS} seconds" if was_ended else "it ends the program that renders it"


def _try(source: str, writer: int) -> NoReturn:
    """In the child: limit it, try, and say how it went."""
    try:
        told = _told(source, _limit)
    except BaseException:
        os._exit(1)
    try:
        os.write(writer, told.encode(errors="replace")[:400])
    finally:
        os._exit(0)


def _told(source: str, limit: Callable[[], str]) -> str:
    """What becomes of compiling and rendering: "ok", or what is wrong; `limit` says what it is without memory."""
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
    given = {"messages": conversation, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    try:
        render_template(template, {"tools": None, "documents": None, **given})  # type: ignore[arg-type]
    except (LimitError, MemoryError):
        raise
    except Exception:
        return


def _limit() -> str:
    """Processor and memory of this process, from now on; what it is told when that memory does not do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return TOO_MUCH if limit_this(SECONDS, BYTES) else NO_MEMORY


if __name__ == "__main__":  # where processes cannot be forked
    os.write(
        1, _told(sys.stdin.buffer.read().decode(errors="replace"), lambda: TOO_MUCH).encode(errors="replace")[:400]
    )
