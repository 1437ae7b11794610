"""Compare `localllm chat` on a Windows console and on a terminal here: the same keys must give the same answers.

wine shows its console on a terminal of this computer, and makes keys of what is typed there. Keys without a character
(arrows) do not arrive: prompt_toolkit asks the console for escape sequences, which wine promises and does not send.
"""

import shutil
from pathlib import Path

from terminal import PROGRAM, Terminal
from wine_environment import environment, named, say, words_there

OPTIONS = ("--temp", "0", "--no-cache")
TAB, ENTER, BACK, EARLIER, SEARCH, CTRL_C = "\t", "\r", "\x08", "\x10", "\x12", "\x03"  # Ctrl-P, Ctrl-R
# What is typed, by what it shows.
KEYS = {
    "a question": "What is localllm?" + ENTER,
    "a wrong letter, taken back": "What is a GGUF film" + BACK + "e?" + ENTER,
    "letters of others": "Grüße, 狐!" + ENTER,
    "history": EARLIER + EARLIER + ENTER,
    "a search in it": SEARCH + "is local" + ENTER,
    "completion": "/und" + TAB + ENTER,
    "several lines": '"""' + ENTER + "What is" + ENTER + 'quantize?"""' + ENTER,
    "a line that goes on": "What is\\" + ENTER + "a chat?" + ENTER,
    "Ctrl-C at the prompt": CTRL_C,
}
LONGEST = 900  # tokens of an answer that Ctrl-C ends before


def compare_console(guide: Path, work: Path) -> None:
    """Compare a conversation. Raises SystemExit, AssertionError if the program does not answer."""
    said = []
    for program, more, path in ((words_there("-m", "localllm"), environment(), named), (PROGRAM, {}, str)):
        state = work / "state"
        shutil.rmtree(state, ignore_errors=True)
        shown = {"columns": 200, "program": program, "XDG_STATE_HOME": path(state), **more}
        chat = Terminal("chat", path(guide), *OPTIONS, **shown)
        chat.prompt()
        said.append([*("".join(chat.press(keys).split()) for keys in KEYS.values()), left(chat)])
        said[-1].append(
            interrupted(Terminal("chat", path(guide), *OPTIONS, "--ignore-eos", "-n", str(LONGEST), **shown))
        )
    for what, there, here in zip([*KEYS, "/exit", "Ctrl-C in an answer"], *said, strict=True):
        if there != here:
            raise SystemExit(f"chat on a console, {what}: not as here\n  {there}\n  {here}")
    say(f"chat on a console: as here: {', '.join(KEYS)}, Ctrl-C in an answer, /exit")


def left(chat: Terminal) -> int:
    """Return the exit code behind /exit."""
    chat.type("/exit" + ENTER)
    return chat.end()


def interrupted(chat: Terminal) -> tuple[bool, int]:
    """Interrupt a long answer by Ctrl-C; return whether the conversation goes on, and the exit code."""
    chat.prompt()
    chat.type("What is localllm?" + ENTER)
    chat.expect("runs")
    chat.type(CTRL_C)
    rest = chat.prompt()
    return "was cut after" not in rest and "/help" in chat.say("/help"), left(chat)
