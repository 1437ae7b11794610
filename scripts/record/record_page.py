"""Photograph the page of `localllm serve` with a real model, as docs/assets/serve-page-light.png and -dark.png.

    python scripts/record/record_page.py MODEL.gguf

Asks the model two questions in headless Chromium (`apt-get install chromium`).
"""

import base64
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from browser import tab  # noqa: E402

NAME = "qwen2.5-coder-1.5b"
WIDTH, HEIGHT = 1000, 640
IS_READY = "document.readyState === 'complete' && !!document.querySelector('#model')?.value"
IS_ANSWERED = "document.querySelectorAll('article').length === {} && !document.querySelector('#send').hidden"
QUESTIONS = ["Why is the sky blue? One sentence.", "Write a Python function that reverses a string. Code only."]


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment |= {f"XDG_{kind}_HOME": f"{home}/{kind}" for kind in ("DATA", "STATE", "CONFIG")}
        command = [sys.executable, "-m", "localllm", "serve", f"{NAME}={model}", "--port", "0"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
            try:
                address = re.search(r"http://\S+?:\d+", server.stderr.readline())
                photograph(address[0], Path(home, "browser"))
            finally:
                server.terminate()


def photograph(address: str, folder: Path) -> None:
    """Ask the questions on the page, and write the pictures."""
    with tab(folder) as page:
        page.call("Page.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1.5, mobile=False)
        page.call("Page.navigate", url=address)
        page.until(IS_READY)
        for count, question in enumerate(QUESTIONS, 1):
            page.value("document.querySelector('#text').focus()")
            page.write(question)
            page.press("Enter", "\r", 13)
            page.until(IS_ANSWERED.format(2 * count))
        page.until("document.querySelector('#sessions').options.length === 1 && !document.title.startsWith('New')")
        for theme in ("light", "dark"):
            page.value(f"$('theme').value = '{theme}'; $('theme').dispatchEvent(new Event('change'))")
            picture = page.call("Page.captureScreenshot", format="png")["data"]
            (ROOT / "docs" / "assets" / f"serve-page-{theme}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main(sys.argv[1])
