"""Slash commands for the clipboard and files: /copy, /write, /files."""

import base64
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import dim, is_terminal
from localllm.errors import UsageError
from localllm.services.search.code_blocks import extract_code

if TYPE_CHECKING:
    from localllm.cli.interactive.conversation import TerminalConversation

CODE = "code"
# Programs that copy stdin to the clipboard, each with the environment variable that it needs.
CLIPBOARDS = (
    ("", ["pbcopy"]), ("WAYLAND_DISPLAY", ["wl-copy"]), ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "--clipboard", "--input"]), ("", ["clip.exe"]),
)  # fmt: skip
LONGEST = 74_994  # bytes of base64 that terminals accept in one sequence


def last_answer(conversation: "TerminalConversation", only_code: bool) -> str:
    """Return the last answer, or its last code block. Raises UsageError if there is none."""
    text = next((line["content"] for line in reversed(conversation.lines) if line["role"] == "assistant"), None)
    if text is None:
        raise UsageError("there is no answer yet")
    code = extract_code(text, last=True) if only_code else text
    if code is None:
        raise UsageError("the last answer has no code block")
    return str(code)


def copy(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    if argument not in ("", CODE):
        raise UsageError("/copy copies the last answer, /copy code its last code block")
    text = last_answer(conversation, argument == CODE)
    copy_to_clipboard(text)
    dim(f"copied {len(text)} characters")


def copy_to_clipboard(text: str) -> None:
    """Copy a text to the clipboard, with a program or the terminal's escape sequence. Raises UsageError."""
    for variable, command in CLIPBOARDS:
        if not variable or os.environ.get(variable):
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command, input=text.encode(errors="replace"), check=True, timeout=5, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                return
    data = base64.b64encode(text.encode(errors="replace"))
    if not is_terminal(sys.stderr) or len(data) > LONGEST:
        raise UsageError("there is no clipboard here (pbcopy, wl-copy, xclip or xsel); /write FILE writes to a file")
    sys.stderr.write(f"\x1b]52;c;{data.decode()}\x07")  # OSC 52, which also works over ssh
    sys.stderr.flush()


def write(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    """Write the last answer to a new file, or with `code` before its name the last code block."""
    from localllm.files.safe_file import SafeFile, resolve_target

    word, _, rest = argument.partition(" ")
    only_code, path = (True, rest.strip()) if word == CODE and rest.strip() else (False, argument)
    if not path:
        raise UsageError("/write FILE, or /write code FILE")
    text, path = last_answer(conversation, only_code), os.path.expanduser(path)
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; give another name")
    with SafeFile(resolve_target(path)) as file:
        file.write(f"{text.removesuffix(chr(10))}\n".encode(errors="replace"))
    dim(f"{path}: {len(text)} characters")


def files(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    """Attach the matching passages of a folder to each question from now on; without a name, stop."""
    path = os.path.expanduser(argument)
    if path and not os.path.exists(path):
        raise UsageError(f"{path}: no such file or folder")
    conversation.folder = path or None
    dim(f"passages of {path} go with every question; /files alone ends that" if path else "no files go with questions")
