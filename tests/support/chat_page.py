"""The page of `localllm serve` in a browser, used as a person uses it."""

import json

from browser import Tab
from served import Served

from localllm.services import sessions

SCRIPT = {
    "rivers": "Rhine, Elbe, Oder.",
    "long": "word " * 300,
    "code": "Use `x` here:\n```python\nfirst = 1\nsecond = 'a long line " + "that goes on " * 20 + "'\n```\nDone.",
    "think": "<think>Hm, well.</think>It is four.",
    "long thoughts": "<think>" + "hm " * 200 + "</think>Done.",
    "sentences": "One is 1.5, roughly. Is it?\nYes! And the rest",
}
WIDTHS = (390, 1000)
READY = "$('model').value && $('sessions').options.length"


class Page:
    """The page as a person uses it."""

    def __init__(self, browser: Tab, served: Served):
        self.browser, self.served = browser, served
        self.value, self.until = browser.value, browser.until
        self.resize(1000)
        self.open()

    def resize(self, width: int) -> None:
        self.browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )

    def open(self) -> None:
        self.browser.call("Page.navigate", url=self.served.url)
        self.until(f"location.href.startsWith({self.served.url!r}) && document.readyState === 'complete' && {READY}")

    def reload(self) -> None:
        self.browser.reload(READY)

    def type(self, text: str) -> None:
        self.value("$('text').focus()")
        self.browser.write(text)

    def send(self, text: str) -> None:
        self.type(text)
        self.browser.press("Enter", "\r", 13)

    def ask(self, text: str) -> None:
        """Send a question and wait for the answer."""
        count = len(self.articles)
        self.send(text)
        self.until(f"document.querySelectorAll('article').length === {count + 2} && !$('send').hidden")

    def choose(self, text: str) -> None:
        """Choose a conversation by its text in the list."""
        option = f"[...$('sessions').options].find((each) => each.textContent.startsWith({text!r}))"
        self.until(f"Boolean({option})")
        self.value(f"$('sessions').value = {option}.value, $('sessions').dispatchEvent(new Event('change'))")

    def click(self, id: str) -> None:
        self.value(f"$('{id}').click()")

    def save_as(self, name: str) -> None:
        self.value(f"window.prompt = () => {name!r}")
        self.click("keep")

    @property
    def articles(self) -> list[str]:
        return self.value("[...document.querySelectorAll('article > .said')].map((each) => each.textContent)")

    def until_shown(self, *texts: str) -> None:
        self.until(f"JSON.stringify({json.dumps(texts)}) === JSON.stringify({self.script_of_articles})")

    script_of_articles = "[...document.querySelectorAll('article > .said')].map((each) => each.textContent)"

    @property
    def status(self) -> str:
        return self.value("$('status').textContent")


def contents(name: str) -> list[str]:
    """Return the texts of a session, [] if it does not exist."""
    return (
        [message["content"] for message in sessions.read_session(name).messages] if sessions.has_session(name) else []
    )


def save_session(name: str, *texts: str) -> None:
    """Save a conversation of these texts as `localllm chat` does."""
    roles = ["user", "assistant"] * len(texts)
    with sessions.SessionFile(name) as file:
        file.write([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])
