"""Slash commands of `chat`: a table of commands with help, action and completion."""

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.cli.argv import did_you_mean
from localllm.cli.interactive.settings import change_option, list_settings, names
from localllm.cli.interactive.taking_out import copy, files, write
from localllm.cli.terminal.output import dim, dim_text, say
from localllm.cli.terminal.render import fact_lines, file_stem
from localllm.cli.terminal.session_list import session_lines
from localllm.cli.terminal.stream_renderer import columns
from localllm.errors import UsageError
from localllm.files.text_file import decode_with_replacement, strip_line_break
from localllm.frozen import frozen
from localllm.services import sessions

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation

LEAVING = ("bye", "quit", "exit")  # as whole lines, without a slash
KEYS = {
    "Ctrl-C": "stop the answer; what was said stays",
    "Ctrl-Z": "suspend; fg goes on",
    "Ctrl-R": "search in what was typed before",
    "Tab": "complete commands, names and files",
    "Alt-Enter": "a new line, as a backslash at the end of a line",
    '"""': "begin and end a text of several lines; what is pasted stays whole",
    "Ctrl-X Ctrl-E": "write in $EDITOR",
    "Ctrl-D": "leave",
}


class ExitChat(Exception):  # noqa: N818 - no error
    """The user ends the chat."""


@frozen
class Tools:
    """The tools of slash commands, in addition to the conversation.

    Attributes:
        open: opens a model by its name.  edit: lets the user change a text; returns None if cancelled.
    """

    open: "Callable[[str], Model]"
    edit: Callable[[str], str | None]


@frozen
class ChatCommand:
    """A slash command.

    Attributes:
        argument: what follows its name, for the help.  help: one line.
        run: what it does with the conversation, the argument and tools. It may raise LocalllmError.
        offers: what Tab offers for an argument, None: names of files.
    """

    argument: str
    help: str
    run: "Callable[[TerminalConversation, str, Tools], None]"
    offers: "Callable[[TerminalConversation], Iterable[str]] | None" = lambda conversation: ()


def execute(conversation: "TerminalConversation", text: str, tools: Tools) -> bool:
    """Run a slash command; return False for other text. Raises ExitChat, and UsageError for an unknown command."""
    if text.strip() in LEAVING:
        raise ExitChat
    if not text.startswith("/"):
        return False
    name, _, argument = text.strip().partition(" ")
    if name not in COMMANDS:
        meant = did_you_mean(name, [each for each in COMMANDS if each != "/clear"])
        other = "/help shows all; a text that begins with a slash needs a space before it"
        raise UsageError(f"there is no {name}; {meant or other}")
    COMMANDS[name].run(conversation, argument.strip(), tools)
    return True


def show_help(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    told = {**{f"{name} {command.argument}".strip(): command.help for name, command in COMMANDS.items()}, **KEYS}
    left, width = max(map(len, told)) + 2, columns()
    if left > width // 2:
        return dim_text("\n".join(line for name, help in told.items() for line in (name, *wrap_lines(help, width, 4))))
    lines = [(name, *wrap_lines(help, width, left)) for name, help in told.items()]
    dim_text("\n".join(line for name, first, *more in lines for line in (name.ljust(left) + first.lstrip(), *more)))


def wrap_lines(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def clear(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    kept = f"; the session {conversation.name} stays as it is" if conversation.file else ""
    conversation.clear()
    dim(f"a new conversation{kept}")


def system(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.set_system(argument or None)
    dim("the system message is set" if argument else "there is no system message now")


def undo(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    if argument and not (argument.isdecimal() and 0 < int(argument) < 10**9):
        raise UsageError("/undo N removes the last N questions; N should be a whole number from 1")
    for number in range(int(argument or 1)):
        if conversation.images:
            dim(f"removed: the image {os.path.basename(conversation.images.pop())}")
            continue
        if conversation.texts:
            dim(f"removed: a file of {len(conversation.texts.pop())} characters")
            continue
        question = conversation.undo()
        if question is None:
            if not number:
                dim("there is nothing to undo")
            break
        dim(f"removed: {shortened(question)}")
    conversation.keep()


def retry(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.ask_again()


def edit(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    """Edit the last question, which is replaced when the edited one is sent."""
    question = next((line["content"] for line in reversed(conversation.lines) if line["role"] == "user"), None)
    if question is None:
        return dim("there is no question yet")
    text = tools.edit(question)
    if text is None or not text.strip():
        return dim("nothing was changed")
    conversation.ask_again(text)


def resume(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.resume()


def read(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    path = os.path.expanduser(require_argument(argument, "/read FILE"))
    most = 64 * (conversation.model.context or 1 << 17)  # bytes; no token has more
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise UsageError(f"{path} does not fit a context of {conversation.model.context} tokens")
    text, warning = decode_with_replacement(data, path)
    if warning:
        say(f"localllm: warning: {warning}")
    text, name = strip_line_break(text), os.path.basename(path)
    conversation.read(text, name)
    dim(f"{len(text)} characters of {name} will be sent with the next question; /undo removes them")


def image(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    path = os.path.abspath(os.path.expanduser(require_argument(argument, "/image FILE")))
    conversation.look(path)
    dim(f"{os.path.basename(path)} will be sent with the next question; /undo removes it")


def save(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.save(require_argument(argument, "/save NAME"))
    dim(f"saved as the session {argument}; it is updated after every answer")


def load(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.load(require_argument(argument, "/load NAME"))
    tell_where(conversation)


def list_sessions(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    lines = session_lines()
    dim_text("\n".join(lines) if lines else "there are no sessions yet: /save NAME begins one")


def branch(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    if not argument:
        names = branches(conversation)
        return dim_text("\n".join(f"{'*' if name == conversation.name else ' '} {name}" for name in names))
    is_there = argument in branches(conversation)
    conversation.branch(argument)
    dim(f"back in the branch {argument}" if is_there else f"new branch {argument}: later messages are only in it")


def branches(conversation: "TerminalConversation") -> list[str]:
    return sorted({*conversation.branches, conversation.name})


def set_option(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    name, _, value = require_argument(argument, "/set OPTION VALUE").partition(" ")
    if not value.strip():
        raise UsageError(f"/set {name} VALUE; `default` resets it, and /show shows its value")
    conversation.set(change_option(conversation.options, name, value.strip()))
    show_options(conversation)


def show(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    model = conversation.model
    tell_where(conversation)
    tell("model", f"{model.name or file_stem(model.path)} · {model.file_type} · {model.path}")
    count = len(conversation.lines)
    messages = "1 message" if count == 1 else f"{count} messages"
    of = f" of {model.context}" if model.context else ""
    tell("context", f"{conversation.used}{of} tokens, in {messages}")
    if model.session.system is not None:
        tell("system", shortened(model.session.system))
    if conversation.images:
        tell("images", f"{len(conversation.images)} for the next question")
    if conversation.texts:
        tell("files", f"{sum(map(len, conversation.texts))} characters for the next question")
    show_options(conversation)


def show_options(conversation: "TerminalConversation") -> None:
    own = [f"{name} = {value}" for name, value, is_usual in list_settings(conversation.options) if not is_usual]
    tell("options", ", ".join(own) or "the usual ones")


def tell_where(conversation: "TerminalConversation") -> None:
    if conversation.file:
        tell("session", f"{conversation.name} · {len(conversation.lines)} messages")


def tell(name: str, text: str) -> None:
    dim_text("\n".join(fact_lines([(name, text)], label=10)))


def stats(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    conversation.stats = parse_switch(argument, conversation.stats, "/stats on|off")
    dim(f"statistics are {'on' if conversation.stats else 'off'}")


def think(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    """Set whether the model's reasoning is shown; the template decides whether it reasons."""
    from localllm.generation.reasoning import CHOICES

    if argument in CHOICES:
        conversation.set(replace(conversation.options, think=argument))
    elif argument not in ("hide", "show"):
        raise UsageError(f"/think {'|'.join(CHOICES)}|hide|show")
    if argument != "off":
        conversation.shows_thoughts = argument != "hide"
    shown = "shown" if conversation.shows_thoughts else "hidden"
    dim(f"thinking is {conversation.options.think}, thoughts are {shown}")


def model(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    if argument:
        conversation.switch(tools.open(argument))
    other = conversation.model
    context = f" · {other.context} tokens of context" if other.context else ""  # some servers do not report it
    dim(f"{other.name or file_stem(other.path)} · {other.file_type}{context}")


def leave(conversation: "TerminalConversation", argument: str, tools: Tools) -> None:
    raise ExitChat


COMMANDS = {
    "/help": ChatCommand("", "show this", show_help),
    "/clear": ChatCommand("", "begin a new conversation", clear),
    "/system": ChatCommand("TEXT", "set the system message; without a text, remove it", system),
    "/undo": ChatCommand("N", "take back the last question and its answer, or so many; or a file that waits", undo),
    "/retry": ChatCommand("", "another answer to the last question", retry),
    "/edit": ChatCommand("", "change the last question and ask it instead", edit),
    "/continue": ChatCommand("", "go on with the last answer", resume),
    "/read": ChatCommand("FILE", "send a file's text with the next question", read, None),
    "/files": ChatCommand("FOLDER", "send the passages of its files that fit each question; alone: no more", files,
                      None),
    "/copy": ChatCommand("code", "copy the last answer, or its last code block, to the clipboard", copy,
                     lambda conversation: ("code",)),
    "/write": ChatCommand("FILE", "write the last answer to a new file; /write code FILE: its last code block", write,
                      None),
    "/image": ChatCommand("FILE", "show an image with the next question", image, None),
    "/save": ChatCommand("NAME", "make this a session, which is written after every answer", save),
    "/load": ChatCommand("NAME", "go on with a session", load, lambda conversation: sessions.names()),
    "/sessions": ChatCommand("", "list them", list_sessions),
    "/branch": ChatCommand("NAME", "try something else: begin a branch or go to one; without a name, list them", branch,
                       branches),
    "/set": ChatCommand("NAME VALUE", "change an option: /set temperature 0.2, /set seed default", set_option,
                    lambda conversation: names(conversation.options)),
    "/show": ChatCommand("", "what holds: model, context, session, options", show),
    "/stats": ChatCommand("on|off", "a line about every answer: tokens per second, context in use", stats,
                      lambda conversation: ("on", "off")),
    "/think": ChatCommand("CHOICE", "on, off, auto: whether the model thinks first; hide, show: whether one sees it",
                      think,
                      lambda conversation: ("on", "off", "auto", "low", "medium", "high", "hide", "show")),
    "/model": ChatCommand("PATH", "go on with another model", model, None),
    "/exit": ChatCommand("", "leave, as bye, quit, exit and Ctrl-D do", leave),
}  # fmt: skip


def complete_line(conversation: "TerminalConversation", line: str) -> Iterator[tuple[str, int]]:
    """Yield the completions of a line up to the cursor: (text, its start in the line)."""
    if not line.startswith("/") or "\n" in line:
        return
    name, space, argument = line.partition(" ")
    if not space:
        yield from ((command, 0) for command in COMMANDS if command.startswith(name))
    elif name in COMMANDS:
        offers, begin = COMMANDS[name].offers, len(line) - len(argument)
        if offers is None:
            yield from ((path, begin) for path in paths(argument))
        else:
            yield from ((offer, begin) for offer in offers(conversation) if offer.startswith(argument))


def paths(begun: str) -> list[str]:
    """List files and folders with a prefix; folders end with a slash, hidden ones are listed after a dot."""
    stem = os.path.basename(begun)
    folder = begun.removesuffix(stem)
    try:
        found = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda item: item.name)
    except OSError:
        return []
    wanted = [item for item in found if item.name.startswith(stem) and (stem or not item.name.startswith("."))]
    return [f"{folder}{item.name}{'/' if item.is_dir() else ''}" for item in wanted]


def require_argument(argument: str, usage: str) -> str:
    if not argument:
        raise UsageError(usage)
    return argument


def parse_switch(argument: str, before: bool, usage: str) -> bool:
    """Parse "on" or "off"; without an argument, toggle. Raises UsageError."""
    if argument not in ("", "on", "off"):
        raise UsageError(usage)
    return not before if not argument else argument == "on"


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:59]}…"
