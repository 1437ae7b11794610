"""A headless Chromium, driven through a pipe: https://chromedevtools.github.io/devtools-protocol/."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
           "--remote-debugging-pipe", "--disable-background-networking", "--disable-extensions"]  # fmt: skip
TIMEOUT = 60  # seconds for an answer of the browser


class NavigatedError(AssertionError):
    """The page navigated away during an evaluation."""


class Tab:
    """A page in the browser."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._held, self._number, self._session = write, read, b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors = list[str]()
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a method of the protocol; fail after TIMEOUT seconds without an answer."""
        self._number, end = self._number + 1, time.monotonic() + TIMEOUT
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                is_ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
                assert is_ready, f"the browser did not answer {method} within {TIMEOUT} seconds"
                piece = os.read(self._read, 1 << 16)
                assert piece, "the browser ended"
                self._held += piece
            line, _, self._held = self._held.partition(b"\0")
            message = json.loads(line)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(message["params"])[:300])
            if message.get("id") == self._number:
                if "navigated" in message.get("error", {}).get("message", ""):
                    raise NavigatedError
                assert "error" not in message, message
                return message["result"]

    def value(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        reply = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + 30
        while True:
            with suppress(NavigatedError):
                if value := self.value(script):
                    return value
            assert time.monotonic() < end, (script, self.errors, self.value("document.body.innerText"))
            time.sleep(0.05)

    def reload(self, is_ready: str) -> None:
        """Reload the page and wait until an expression is true in the new one."""
        self.value("window.isOld = true")
        self.call("Page.reload")
        self.until(f"!window.isOld && document.readyState === 'complete' && ({is_ready})")

    def press(self, key: str, text: str = "", code: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def write(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", text=text)


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """Start a browser and yield its page; folder: for the browser's files."""
    assert CHROMIUM
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def pipes() -> None:  # its protocol is at 3 and 4
        os.dup2(theirs_in, 100)
        os.dup2(theirs_out, 101)
        os.dup2(100, 3)
        os.dup2(101, 4)

    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
