"""Test the page of localllm serve: self-contained, usable without a mouse, and saving conversations as chat does."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from browser import CHROMIUM, tab
from models import write
from models.projectors import projector, seeing, write_projector
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.server.guard import AccessRules
from localllm.server.page import FILE, load_page
from localllm.services import sessions
from tests.integration.test_serve import THINKS, until

SOURCE = FILE.read_text(encoding="utf-8")
SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "HELLO"}]
KEY = "correct horse battery"


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    rules = AccessRules(origins=["https://friend.example"])
    with serving({"scripted": lambda: scripted(path, {})}, rules) as server:
        yield server


class Controls(HTMLParser):
    """A parser of a page's controls."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.unlabelled = list[str](), list[tuple[str, dict]](), list[dict]()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("select", "input", "textarea") and "label" not in self.open:
            self.unlabelled.append(dict(attrs))
        if tag not in ("meta", "input", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open.pop() != tag:
            pass


def test_the_page_loads_nothing_from_elsewhere(served: Served):
    reply = served.get("/")
    policy = reply.headers["content-security-policy"]
    assert (
        reply.status == 200
        and reply.body == FILE.read_bytes()
        and reply.headers["content-type"].startswith("text/html")
    )
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/=]{44}'", policy)) == 2
    assert not re.search(r"https?://|//[a-z]+\.|@import|<link|<img|eval\(|innerHTML|onclick=|style=", SOURCE)


def test_the_page_can_be_used_without_a_mouse():
    """Label every control, use real buttons, and announce new text."""
    controls = Controls()
    controls.feed(SOURCE)
    tags = dict(controls.tags)
    assert controls.unlabelled == [] and controls.open == []
    assert ("lang", "en") in tags["html"].items() and "width=device-width" in str(controls.tags)
    log, spoken = (attributes for _, attributes in controls.tags if attributes.get("role") == "log")
    assert (log["aria-live"], log["tabindex"]) == ("off", "0") and log["aria-label"]
    assert spoken["aria-live"] == "polite" and spoken["aria-label"]
    assert all(attributes.get("type") in ("button", "submit") for tag, attributes in controls.tags if tag == "button")
    assert any(attributes.get("role") == "status" for _, attributes in controls.tags)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_valid_javascript(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(re.findall("<script>(.*?)</script>", SOURCE, re.DOTALL)[0], encoding="utf-8")
    assert subprocess.run(["node", "--check", script], capture_output=True).stderr == b""


def test_the_content_security_policy_has_the_current_hashes():
    assert load_page()[0] == FILE.read_bytes()


def test_conversations_of_the_page_are_sessions_of_chat(served: Served):
    assert served.get("/sessions").json == {"sessions": []}
    body = b'{"messages": %s, "model": "scripted"}' % repr(SAID).replace("'", '"').encode()
    put = {"Content-Type": "application/json"}
    assert served.ask("PUT", "/sessions/trip", body, put).status == 200
    assert sessions.read_session("trip").messages == SAID and sessions.read_session("trip").model.name == "scripted"
    with sessions.SessionFile("trip") as file:
        assert served.ask("PUT", "/sessions/trip", body, put).status == 400  # a chat has it open
        file.write([{**SAID[0]}, {**SAID[1], "finish": "stop", "tokens": 5}])
    assert served.get("/sessions").json == {"sessions": [{"name": "trip"}]}
    messages = served.get("/sessions/trip").json["messages"]
    assert [message["content"] for message in messages] == ["hello", "HELLO"]
    longer = b'{"messages": %s}' % repr([*SAID, *SAID]).replace("'", '"').encode()
    assert served.ask("PUT", "/sessions/trip", longer, put).status == 200
    kept = sessions.read_session("trip").messages
    assert len(kept) == 4 and kept[1]["finish"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2fx", "a%2fb", ".hidden", "x" * 99, "a%00b", "a%0ab"])
def test_invalid_session_names_are_refused(served: Served, name: str):
    assert served.get(f"/sessions/{name}").status in (400, 404)
    reply = served.ask("PUT", f"/sessions/{name}", b'{"messages": []}', {"Content-Type": "application/json"})
    assert reply.status in (400, 404) and not sessions.list_names()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"{}", b'{"messages": 5}', b'{"messages": [{"role": "tool", "content": "x"}]}', b'{"messages": [{}]}',
             b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}']
)  # fmt: skip
def test_invalid_conversations_are_not_saved(served: Served, body: bytes):
    assert served.ask("PUT", "/sessions/a", body, {"Content-Type": "application/json"}).status == 400
    assert not sessions.list_names()


def test_conversations_are_not_for_other_sites(served: Served):
    """Refuse even sites that may use the model."""
    assert served.get("/v1/models", Origin="https://friend.example").status == 200
    for method, address in (
        ("GET", "/sessions"),
        ("GET", "/sessions/trip"),
        ("PUT", "/sessions/trip"),
        ("PATCH", "/sessions/trip"),
        ("DELETE", "/sessions/trip"),
        ("OPTIONS", "/sessions"),
    ):
        assert served.ask(method, address, None, {"Origin": "https://friend.example"}).status == 403
    with serving({"scripted": lambda: pytest.fail("opened")}, AccessRules(keys=[KEY])) as locked:
        assert locked.get("/").status == 200 and locked.get("/sessions").status == 401
        assert locked.get("/sessions", Authorization=f"Bearer {KEY}").status == 200


ASKED = {
    "hello": "Hello <b>there</b>.\n```python\nx = 1\n```\nDone.",
    "hi": "Hi!",
    "slowly": "word " * 400,
    "think": "<think>Hm, well.</think>It is four.",
}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_works_by_keyboard_in_a_browser(tmp_path, monkeypatch):
    """Ask, stop, edit, save, and find the conversation again, at a phone's width."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = str(write_tiny_model(tmp_path / "tiny.gguf", chat_template=THINKS))
    with serving({"scripted": lambda: scripted(path, ASKED)}) as served, tab(tmp_path / "browser") as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
        browser.call("Page.navigate", url=served.url)
        browser.until("document.querySelector('#model') && document.querySelector('#model').value === 'scripted'")
        assert browser.value("document.activeElement.id") == "text"

        def ask(text: str) -> None:
            browser.write(text)
            browser.press("Enter", "\r", 13)

        ask("hello")
        browser.until("document.querySelectorAll('article').length === 2 && !document.querySelector('#send').hidden")
        assert browser.value("document.querySelector('figure code').textContent") == "x = 1\n"
        assert browser.value("document.querySelector('article.assistant').innerText").count("<b>there</b>") == 1
        assert browser.value("document.querySelector('figure button').textContent") == "Copy"
        assert browser.value("document.documentElement.scrollWidth") <= 360

        ask("think")
        browser.until("document.querySelectorAll('article').length === 4 && !document.querySelector('#send').hidden")
        assert browser.value("document.querySelector('details').open") is False
        assert browser.value("document.querySelector('details .said').textContent") == "Hm, well."

        ask("slowly")
        browser.until("document.querySelectorAll('article').length === 6")
        browser.press("Escape", code=27)
        browser.until("document.querySelector('#status').textContent === 'Stopped.'")
        until(lambda: served.service.pool.count_requests() == (0, 0))

        browser.value("document.querySelectorAll('article.user button')[0].click()")
        assert browser.value("document.querySelectorAll('article').length") == 0
        assert browser.value("document.querySelector('#text').value") == "hello"
        browser.value("document.querySelector('#text').value = ''; window.prompt = () => 'trip'")
        ask("hi")
        browser.until("document.querySelectorAll('article').length === 2 && !document.querySelector('#send').hidden")
        browser.value("document.querySelector('#keep').click()")
        browser.until("document.querySelector('#sessions').value === 'trip'")
        until(lambda: sessions.list_names() == ["trip"])  # the page shows a name before the server has renamed
        assert [message["content"] for message in sessions.read_session("trip").messages] == ["hi", "Hi!"]

        browser.reload("[...document.querySelectorAll('#sessions option')].some((each) => each.value === 'trip')")
        browser.value(
            "const s = document.querySelector('#sessions'); s.value = 'trip'; s.dispatchEvent(new Event('change'))"
        )
        browser.until("document.querySelectorAll('article').length === 2")
        assert browser.errors == []


PAINTED = """(async () => {
  const canvas = new OffscreenCanvas(60, 40), pen = canvas.getContext("2d");
  pen.fillStyle = "rgb(200, 30, 30)"; pen.fillRect(0, 0, 30, 40);
  const file = new File([await canvas.convertToBlob({ type: "image/png" })], NAME, { type: "image/png" });
  const files = new DataTransfer();
  files.items.add(file);
  THEN
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_images_can_be_attached_in_a_browser(tmp_path, monkeypatch):
    """Choose, paste, drop, preview, remove and edit images, which reach the model and survive a reload.

    Do not save such a conversation, nor offer images to a model without a projector.
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    write(seeing("gemma3", seed=5, context=2048), tmp_path / "tiny.gguf")
    write_projector(projector("gemma3"), tmp_path / "mmproj-tiny.gguf")
    (tmp_path / "blind").mkdir()
    blind = str(write_tiny_model(tmp_path / "blind" / "blind.gguf", chat_template=THINKS))
    models = {"seeing": str(tmp_path / "tiny.gguf"), "blind": lambda: scripted(blind, ASKED)}
    with serving(models) as served, tab(tmp_path / "browser") as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
        browser.call("Page.navigate", url=served.url)
        browser.until("document.querySelector('#attach') && !document.querySelector('#attach').hidden")

        def attach(name: str, then: str) -> None:
            browser.value(PAINTED.replace("NAME", f'"{name}"').replace("THEN", then))
            browser.until(f"document.querySelector('#status').textContent === 'Attached: {name}'")

        attach("one.png", "const f = $('files'); f.files = files.files; f.dispatchEvent(new Event('change'))")
        attach("two.png", "document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: files }))")
        browser.until("[...document.querySelectorAll('#attached canvas')].every((each) => each.width === 60)")
        colour = "document.querySelector('#attached canvas').getContext('2d').getImageData(5, 5, 1, 1).data.join()"
        assert browser.value(colour) == "200,30,30,255"
        browser.value("document.querySelectorAll('#attached button')[1].click()")
        assert browser.value("document.querySelector('#attached').textContent") == ""
        assert browser.value("document.querySelectorAll('#attached canvas').length") == 1
        browser.write("What?")
        browser.press("Enter", "\r", 13)
        browser.until("document.querySelectorAll('article').length === 2 && !document.querySelector('#send').hidden")
        model = served.service.pool.entries["seeing"].model
        assert model.vision.encoder.encoded == 1
        assert browser.value("document.querySelectorAll('article.user canvas').length") == 1
        assert browser.value("document.querySelector('#attached').offsetParent") is None
        assert browser.value("document.querySelector('#files').offsetParent") is None
        assert browser.value("document.documentElement.scrollWidth") <= 360
        browser.value("window.prompt = () => 'trip'; document.querySelector('#keep').click()")
        browser.until("document.querySelector('#status').textContent.includes('are not saved')")
        assert sessions.list_names() == []
        attach("three.png", "document.dispatchEvent(Object.assign(new Event('drop'), { dataTransfer: files }))")
        browser.reload("document.querySelectorAll('article').length === 2")
        browser.until("[...document.querySelectorAll('canvas')].map((each) => each.width).join() === '60,60'")
        assert browser.value("document.querySelectorAll('#attached canvas, article.user canvas').length") == 2
        browser.value("document.querySelector('article.user button').click()")
        assert browser.value("document.querySelectorAll('#attached canvas').length") == 1
        browser.value("$('fresh').click(); $('model').value = 'blind'; $('text').focus()")
        browser.write("hello")
        browser.press("Enter", "\r", 13)
        browser.until("document.querySelectorAll('article').length === 2 && document.querySelector('#attach').hidden")
        assert browser.errors == []
