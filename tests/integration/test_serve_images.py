"""localllm serve with images: in every interface, beside callers without, from allowed folders, and refused."""

import base64
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from models import write
from models.projectors import projector, seeing, write_projector
from PIL import Image
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm import api
from localllm.cli.interactive.conversation import TerminalConversation
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.server.http import Limits
from localllm.services.remote.http import Endpoint
from localllm.services.remote.model import RemoteModel
from tests.unit.engine.test_vision_encoder import picture

FAMILIES = "gemma3", "idefics3", "llava"
GREEDY = {"temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images, and a folder for each family with a model and its projector; Gemma's images have 144 rows."""
    folder = tmp_path_factory.mktemp("seeing")
    for name in FAMILIES:
        (folder / name).mkdir()
        write(seeing(name, seed=5 if name == "gemma3" else 0, context=2048), folder / name / "tiny.gguf")
        write_projector(projector(name, side=336 if name == "gemma3" else 56), folder / name / "mmproj.gguf")
    (folder / "shown").mkdir()
    picture((131, 90), 1).save(folder / "shown" / "one.png")
    picture((60, 200), 2).save(folder / "shown" / "two.jpg")
    picture((40, 40), 3).save(folder / "hidden.png")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    models = {name: str(folder / name / "tiny.gguf") for name in FAMILIES}
    blind = str(write_tiny_model(folder / "blind.gguf"))
    with serving(
        {**models, "blind": lambda: scripted(blind, {})}, limits=Limits(folders=[str(folder / "shown")])
    ) as it:
        yield it


def url_of(path: Path) -> str:
    kind = "png" if path.suffix == ".png" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def asked(text: str, *urls: str) -> list[dict]:
    return [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": text}]}]


def content(reply) -> str:
    assert reply.status == 200, reply.json
    return reply.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_python_says(served: Served, folder, name):
    """The same answers, of two images too, and others for other images."""
    one, two = folder / "shown" / "one.png", folder / "shown" / "two.jpg"
    found = []
    with api.open_model(folder / name / "tiny.gguf", 2, cache=False) as model:
        for images in ([one], [two], [two, one]):
            told = "".join(model.chat([{"role": "user", "content": "What?", "images": images}], **GREEDY))
            body = {"model": name, "messages": asked("What?", *map(url_of, images)), **GREEDY}
            assert content(served.post("/v1/chat/completions", body)) == told
            found.append(told)
    assert len(set(found)) == 3


def test_every_interface(served: Served, folder):
    """The same prompt and the same answer, with images in what is asked and in what a tool returned."""
    path, body = folder / "shown" / "one.png", {"model": "gemma3", "temperature": 0}
    data = base64.b64encode(path.read_bytes()).decode()
    chat = served.post("/v1/chat/completions", {**body, "max_tokens": 10, "messages": asked("What?", url_of(path))})
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}]
    claude = served.post("/v1/messages", {**body, "max_tokens": 10, "messages": messages})
    shown = [{"type": "input_image", "image_url": url_of(path)}, {"type": "input_text", "text": "What?"}]
    given = {**body, "max_output_tokens": 10, "input": [{"role": "user", "content": shown}]}
    responses = served.post("/v1/responses", given)
    told = content(chat)
    assert claude.json["content"][0]["text"] == responses.json["output"][0]["content"][0]["text"] == told
    count = served.post("/v1/messages/count_tokens", {"model": "gemma3", "messages": messages}).json["input_tokens"]
    assert count == chat.json["usage"]["prompt_tokens"] == responses.json["usage"]["input_tokens"] > 144
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block], "is_error": True}
    turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [use]}]
    came = [*turns, {"role": "user", "content": [result]}]
    with_tool = served.post("/v1/messages", {**body, "max_tokens": 10, "messages": came})
    assert with_tool.status == 200 and with_tool.json["usage"]["input_tokens"] > 144


def test_callers_with_and_without(served: Served, folder):
    """16 at once, half of them streaming, some with images, each gets what it gets alone."""
    urls = [url_of(folder / "shown" / name) for name in ("one.png", "two.jpg")]
    shown = [[], [urls[0]], [urls[1]], urls]

    def ask(number: int) -> str:
        text = "Look. " * (5 * number) + "What?"
        body = {"model": "gemma3", "messages": asked(text, *shown[number % 4]), "max_tokens": 12, "seed": number}
        reply = served.post("/v1/chat/completions", {**body, "stream": number % 3 == 0})
        if number % 3:
            return content(reply)
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in reply.events)

    with api.open_model(folder / "gemma3" / "tiny.gguf", 2, cache=False) as model:
        expected = []
        for number in range(16):
            parts = [{"type": "image_url", "image_url": url} for url in shown[number % 4]]
            text = "Look. " * (5 * number) + "What?"
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
            expected.append("".join(model.chat(messages, 12, seed=number)))
    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(ask, range(16))] == expected
    assert len(set(expected)) > 12


def test_what_was_read_is_used(folder):
    """Of the same image nothing is read again, of another one all; two images count in their order."""
    one, two = (url_of(folder / "shown" / name) for name in ("one.png", "two.jpg"))

    def cached(*shown: str, text: str) -> int:
        body = {"messages": asked(text, *shown), **GREEDY}
        return served.post("/v1/chat/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving({"gemma3": str(folder / "gemma3" / "tiny.gguf")}) as served:
        assert cached(one, text="What?") == 0
        assert cached(one, text="And where?") >= 145
        assert cached(two, text="What?") < 20
        assert cached(two, one, text="What?") >= 145
        assert cached(two, one, text="When?") >= 290
        assert 145 <= cached(one, two, text="What?") < 290
        assert served.model().vision.encoder.encoded == 2


def test_files_below_folders(served: Served, folder):
    """By their path, or as in llama.cpp relative to the folder; percent signs are undone."""
    path = folder / "shown" / "one.png"
    (folder / "shown" / "a b.png").write_bytes(path.read_bytes())
    body = {"model": "llava", **GREEDY}
    told = content(served.post("/v1/chat/completions", {**body, "messages": asked("What?", url_of(path))}))
    for url in (path.as_uri(), "file://one.png", (folder / "shown" / "a b.png").as_uri(), "file://../shown/one.png"):
        assert content(served.post("/v1/chat/completions", {**body, "messages": asked("What?", url)})) == told


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "file://../hidden.png", "file://link.png", "file://\0", "file://", "file://../shown",
            "file://missing.png", "file://pipe", "file://%2e%2e/hidden.png"],
)  # fmt: skip
def test_no_other_files(served: Served, folder, url):
    """Nor anything that is no file; and a pipe does not make anybody wait."""
    link, pipe = folder / "shown" / "link.png", folder / "shown" / "pipe"
    if not link.is_symlink():
        link.symlink_to(folder / "hidden.png")
    if not pipe.exists() and hasattr(os, "mkfifo"):
        os.mkfifo(pipe)
    reply = served.post("/v1/chat/completions", {"model": "llava", "messages": asked("What?", url)})
    message = reply.json["error"]["message"]
    assert reply.status == 400 and "\n" not in message and "Error" not in message
    assert "outside of the folders" in message or "image not found" in message


def test_no_files_without_folders(folder):
    with serving({"llava": str(folder / "llava" / "tiny.gguf")}) as served:
        uri = (folder / "shown" / "one.png").as_uri()
        reply = served.post("/v1/chat/completions", {"messages": asked("What?", uri)})
        assert reply.status == 400 and "outside of the folders" in reply.json["error"]["message"]


REFUSED = [
    ("http://127.0.0.1:1/a.png", "URLs are not fetched"),
    ("https://example.org/a.png", "URLs are not fetched"),
    ("one.png", "URLs are not fetched"),
    ("", "URLs are not fetched"),
    ("data:image/png;base64,####", "an image URL has invalid base64"),
    ("data:image/png,abc", "must begin with data:image/...;base64,"),
    ("data:image/png;base64,", "an empty file, no image"),
    ("data:image/png;base64,aGVsbG8=", "not an image that can be read"),
    (None, "image_url.url is missing"),
    (5, "image_url.url must be a string"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED)
def test_one_line(served: Served, url, message):
    reply = served.post("/v1/chat/completions", {"model": "llava", "messages": asked("What?", url)})
    assert reply.status == 400 and message in reply.json["error"]["message"]
    assert "\n" not in reply.json["error"]["message"]


def test_images_of_answers_are_seen(served: Served, folder):
    """As those of who asks: what it drew before is in front of the model."""
    url = url_of(folder / "shown" / "one.png")

    def tokens(content: object) -> int:
        messages = [*asked("Draw."), {"role": "assistant", "content": content}, *asked("What is it?")]
        reply = served.post("/v1/chat/completions", {"model": "llava", "messages": messages, "max_tokens": 1})
        assert reply.status == 200
        return reply.json["usage"]["prompt_tokens"]

    assert tokens([{"type": "text", "text": "Here"}, part(url)]) > tokens("Here")


def test_refused(served: Served, folder):
    """Images where nobody asks, too many, by an id, and of models that see none."""
    url = url_of(folder / "shown" / "one.png")

    def said(path: str, body: dict) -> str:
        reply = served.post(path, {"model": "llava", "max_tokens": 4, **body})
        assert reply.status == 400
        return reply.json["error"]["message"]

    chat = "/v1/chat/completions"
    assert "a system message can only contain text" in said(
        chat, {"messages": [{"role": "system", "content": [part(url)]}]}
    )
    assert "too many images: 65" in said(chat, {"messages": asked("What?", *[url] * 65)})
    block = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert "file_id" in said("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    shown = {"type": "input_image", "file_id": "f"}
    assert "file_id" in said("/v1/responses", {"max_tokens": None, "input": [{"role": "user", "content": [shown]}]})
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    assert "data is missing" in said("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    assert "there is no projector" in said(chat, {"model": "blind", "messages": asked("What?", url)})
    drawn = [*asked("Draw."), {"role": "assistant", "content": [part(url)]}, *asked("What is it?")]
    assert "cannot read images" in said(chat, {"model": "blind", "messages": drawn})
    sees = {each["name"]: each.get("modalities") for each in served.get("/props").json["models"]}
    assert sees["blind"] == {"vision": False} and sees["llava"] == {"vision": True}


@pytest.mark.slow
def test_a_bomb_is_small_and_refused(served: Served, tmp_path):
    """20000 x 20000 pixels in some kB."""
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    Image.MAX_IMAGE_PIXELS = before
    reply = served.post(
        "/v1/chat/completions", {"model": "llava", "messages": asked("?", url_of(tmp_path / "bomb.png"))}
    )
    assert reply.status == 400 and "pixels" in reply.json["error"]["message"]


def test_by_endpoint(served: Served, folder, cli, tmp_path, monkeypatch):
    """run, chat and map show a server what they would show a model here, and get the same answers."""
    monkeypatch.chdir(folder / "shown")
    more = ["--temp", "0", "-n", "10"]

    def said(*arguments: str) -> str:
        code, out, err = cli(*arguments, *more)
        assert code == 0, err
        return out

    here, there = str(folder / "gemma3" / "tiny.gguf"), ["gemma3", "--endpoint", served.url]
    for images in (["--image", "one.png"], ["--image", "two.jpg", "--image", "one.png"]):
        assert said("run", *there, "-p", "What?", *images) == said("run", here, "-p", "What?", *images, "--no-cache")
    record = json.dumps({"prompt": "What?", "image": ["two.jpg", "one.png"]}).encode()
    (tmp_path / "in.jsonl").write_bytes(record)
    records = [said("map", *of, str(tmp_path / "in.jsonl")) for of in ([here], there)]
    assert len({json.loads(record)["output"] for record in records}) == 1
    code, _, err = cli("run", "blind", "--endpoint", served.url, "-p", "?", "--image", "one.png")
    assert code == 1 and "cannot read images" in err and len(err.splitlines()) == 1
    code, _, err = cli("run", *there, "-p", "?", "--image", "one.png", "--mmproj", "x.gguf")
    assert code == 2 and "mmproj is not available with" in err


def test_in_a_chat_with_a_server(served: Served, folder, capfd):
    """/image goes along with the next question; what is no image is refused here."""
    path = str(folder / "shown" / "one.png")
    options = GenerationOptions(8, sampling=SamplingOptions(temperature=0))
    conversation = TerminalConversation(RemoteModel(Endpoint.of(served.url, None), "gemma3"), options, ProgressLine())
    conversation.look(path)
    conversation.ask("What?")
    with api.open_model(folder / "gemma3" / "tiny.gguf", 2, cache=False) as model:
        told = "".join(model.chat([{"role": "user", "content": "What?", "images": [path]}], 8, temperature=0))
    asked, said = conversation.lines
    assert (asked["images"], said["content"], conversation.images) == ([path], told, [])
    with pytest.raises(UsageError, match="not an image"):
        conversation.look(__file__)


@pytest.mark.slow
def test_damaged_images(served: Served, folder):
    """200 files in which bytes were changed, pieces left out, or base64 spoilt: each is answered, or one line is."""
    random, kinds = np.random.default_rng(31), Counter[int]()
    whole = [(folder / "shown" / name).read_bytes() for name in ("one.png", "two.jpg")]

    def ask(number: int) -> None:
        data = bytearray(whole[number % 2])
        for place in random.integers(0, len(data) if number % 3 else 200, 1 + number % 5):
            data[place] = random.integers(256)
        text = base64.b64encode(bytes(data[: random.integers(1, len(data))] if number % 4 == 0 else data)).decode()
        text = text[: random.integers(len(text))] + "=*\n"[number % 3] if number % 7 == 0 else text
        body = {"model": "llava", "messages": asked("?", f"data:image/png;base64,{text}"), "max_tokens": 1}
        reply = served.post("/v1/chat/completions", body)
        message = reply.json.get("error", {}).get("message", "")
        assert (reply.status == 200) == (not message) and "\n" not in message and "internal" not in message, message
        kinds[reply.status] += 1

    for number in range(200):
        ask(number)
    assert set(kinds) == {200, 400} and min(kinds.values()) > 20
