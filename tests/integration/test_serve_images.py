"""Test localllm serve with images: in every API, in batches, from allowed folders, and refused."""

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
from localllm.server.http import ClientLimits
from localllm.services.remote.http import Endpoint
from localllm.services.remote.model import RemoteModel
from tests.unit.engine.test_vision_encoder import picture

FAMILIES = "gemma3", "idefics3", "llava"
GREEDY = {"temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make images, and a folder per family with a model and its projector; Gemma's images have 144 rows."""
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
        {**models, "blind": lambda: scripted(blind, {})}, limits=ClientLimits(folders=[str(folder / "shown")])
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
def test_answers_about_images_equal_those_of_python(served: Served, folder, name):
    """Use one and two images, and compare answers to different ones."""
    one, two = folder / "shown" / "one.png", folder / "shown" / "two.jpg"
    answers = []
    with api.open_model(folder / name / "tiny.gguf", 2, cache=False) as model:
        for images in ([one], [two], [two, one]):
            expected = "".join(model.chat([{"role": "user", "content": "What?", "images": images}], **GREEDY))
            body = {"model": name, "messages": asked("What?", *map(url_of, images)), **GREEDY}
            assert content(served.post("/v1/chat/completions", body)) == expected
            answers.append(expected)
    assert len(set(answers)) == 3


def test_every_api_gives_the_same_prompt_and_answer_for_images(served: Served, folder):
    """Show images in questions and in tool results."""
    path, body = folder / "shown" / "one.png", {"model": "gemma3", "temperature": 0}
    data = base64.b64encode(path.read_bytes()).decode()
    chat = served.post("/v1/chat/completions", {**body, "max_tokens": 10, "messages": asked("What?", url_of(path))})
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}]
    claude = served.post("/v1/messages", {**body, "max_tokens": 10, "messages": messages})
    shown = [{"type": "input_image", "image_url": url_of(path)}, {"type": "input_text", "text": "What?"}]
    fields = {**body, "max_output_tokens": 10, "input": [{"role": "user", "content": shown}]}
    responses = served.post("/v1/responses", fields)
    expected = content(chat)
    assert claude.json["content"][0]["text"] == responses.json["output"][0]["content"][0]["text"] == expected
    count = served.post("/v1/messages/count_tokens", {"model": "gemma3", "messages": messages}).json["input_tokens"]
    assert count == chat.json["usage"]["prompt_tokens"] == responses.json["usage"]["input_tokens"] > 144
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block], "is_error": True}
    turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [use]}]
    came = [*turns, {"role": "user", "content": [result]}]
    with_tool = served.post("/v1/messages", {**body, "max_tokens": 10, "messages": came})
    assert with_tool.status == 200 and with_tool.json["usage"]["input_tokens"] > 144


def test_concurrent_callers_with_and_without_images_are_answered_as_alone(served: Served, folder):
    """Send 16 requests, half of them streaming."""
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


def test_the_prefix_of_an_image_is_reused(folder):
    """Prefill nothing of the same image, and all of another; order matters."""
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


def test_image_files_below_allowed_folders_are_read(served: Served, folder):
    """Accept a path, or one relative to the folder as llama.cpp does; decode percent escapes."""
    path = folder / "shown" / "one.png"
    (folder / "shown" / "a b.png").write_bytes(path.read_bytes())
    body = {"model": "llava", **GREEDY}
    expected = content(served.post("/v1/chat/completions", {**body, "messages": asked("What?", url_of(path))}))
    for url in (path.as_uri(), "file://one.png", (folder / "shown" / "a b.png").as_uri(), "file://../shown/one.png"):
        assert content(served.post("/v1/chat/completions", {**body, "messages": asked("What?", url)})) == expected


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "file://../hidden.png", "file://link.png", "file://\0", "file://", "file://../shown",
            "file://missing.png", "file://pipe", "file://%2e%2e/hidden.png"],
)  # fmt: skip
def test_files_outside_the_folders_are_refused(served: Served, folder, url):
    """Refuse pipes and folders without waiting."""
    link, pipe = folder / "shown" / "link.png", folder / "shown" / "pipe"
    if not link.is_symlink():
        link.symlink_to(folder / "hidden.png")
    if not pipe.exists() and hasattr(os, "mkfifo"):
        os.mkfifo(pipe)
    reply = served.post("/v1/chat/completions", {"model": "llava", "messages": asked("What?", url)})
    message = reply.json["error"]["message"]
    assert reply.status == 400 and "\n" not in message and "Error" not in message
    assert "outside the folders" in message or "image not found" in message


def test_without_allowed_folders_no_file_is_read(folder):
    with serving({"llava": str(folder / "llava" / "tiny.gguf")}) as served:
        uri = (folder / "shown" / "one.png").as_uri()
        reply = served.post("/v1/chat/completions", {"messages": asked("What?", uri)})
        assert reply.status == 400 and "outside the folders" in reply.json["error"]["message"]


REFUSED = [
    ("http://127.0.0.1:1/a.png", "URLs are not fetched"),
    ("https://example.org/a.png", "URLs are not fetched"),
    ("one.png", "URLs are not fetched"),
    ("", "URLs are not fetched"),
    (
        "data:image/png;base64,####",
        "the image's data URL must contain valid base64 after the comma; encode the image again",
    ),
    ("data:image/png,abc", "must begin with data:image/...;base64,"),
    ("data:image/png;base64,", "the file is empty"),
    ("data:image/png;base64,aGVsbG8=", "expected an image file"),
    (None, "image_url.url is missing"),
    (5, "image_url.url must be a string"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED)
def test_invalid_images_are_refused_in_one_line(served: Served, url, message):
    reply = served.post("/v1/chat/completions", {"model": "llava", "messages": asked("What?", url)})
    assert reply.status == 400 and message in reply.json["error"]["message"]
    assert "\n" not in reply.json["error"]["message"]


def test_images_of_assistants_are_prefilled(served: Served, folder):
    url = url_of(folder / "shown" / "one.png")

    def tokens(content: object) -> int:
        messages = [*asked("Draw."), {"role": "assistant", "content": content}, *asked("What is it?")]
        reply = served.post("/v1/chat/completions", {"model": "llava", "messages": messages, "max_tokens": 1})
        assert reply.status == 200
        return reply.json["usage"]["prompt_tokens"]

    assert tokens([{"type": "text", "text": "Here"}, part(url)]) > tokens("Here")


def test_images_are_refused_where_unsupported(served: Served, folder):
    """Try system messages, too many images, an id, and a model without vision."""
    url = url_of(folder / "shown" / "one.png")

    def refusal_of(path: str, body: dict) -> str:
        reply = served.post(path, {"model": "llava", "max_tokens": 4, **body})
        assert reply.status == 400
        return reply.json["error"]["message"]

    chat = "/v1/chat/completions"
    assert "a system message can only contain text" in refusal_of(
        chat, {"messages": [{"role": "system", "content": [part(url)]}]}
    )
    assert "too many images: 65" in refusal_of(chat, {"messages": asked("What?", *[url] * 65)})
    block = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert "file_id" in refusal_of("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    shown = {"type": "input_image", "file_id": "f"}
    assert "file_id" in refusal_of(
        "/v1/responses", {"max_tokens": None, "input": [{"role": "user", "content": [shown]}]}
    )
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    assert "data is missing" in refusal_of("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    assert "there is no projector" in refusal_of(chat, {"model": "blind", "messages": asked("What?", url)})
    drawn = [*asked("Draw."), {"role": "assistant", "content": [part(url)]}, *asked("What is it?")]
    assert "cannot read images" in refusal_of(chat, {"model": "blind", "messages": drawn})
    sees = {each["name"]: each.get("modalities") for each in served.get("/props").json["models"]}
    assert sees["blind"] == {"vision": False} and sees["llava"] == {"vision": True}


@pytest.mark.slow
def test_a_decompression_bomb_is_refused(served: Served, tmp_path):
    """Send 20000 x 20000 pixels in a few kB."""
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    Image.MAX_IMAGE_PIXELS = before
    reply = served.post(
        "/v1/chat/completions", {"model": "llava", "messages": asked("?", url_of(tmp_path / "bomb.png"))}
    )
    assert reply.status == 400 and "pixels" in reply.json["error"]["message"]


def test_run_chat_and_map_send_images_to_an_endpoint(served: Served, folder, cli, tmp_path, monkeypatch):
    """Compare with a local model."""
    monkeypatch.chdir(folder / "shown")
    more = ["--temp", "0", "-n", "10"]

    def answer_of(*arguments: str) -> str:
        code, out, err = cli(*arguments, *more)
        assert code == 0, err
        return out

    here, there = str(folder / "gemma3" / "tiny.gguf"), ["gemma3", "--endpoint", served.url]
    for images in (["--image", "one.png"], ["--image", "two.jpg", "--image", "one.png"]):
        assert answer_of("run", *there, "-p", "What?", *images) == answer_of(
            "run", here, "-p", "What?", *images, "--no-cache"
        )
    record = json.dumps({"prompt": "What?", "image": ["two.jpg", "one.png"]}).encode()
    (tmp_path / "in.jsonl").write_bytes(record)
    records = [answer_of("map", *of, str(tmp_path / "in.jsonl")) for of in ([here], there)]
    assert len({json.loads(record)["output"] for record in records}) == 1
    code, _, err = cli("run", "blind", "--endpoint", served.url, "-p", "?", "--image", "one.png")
    assert code == 1 and "cannot read images" in err and len(err.splitlines()) == 1
    code, _, err = cli("run", *there, "-p", "?", "--image", "one.png", "--mmproj", "x.gguf")
    assert code == 2 and "mmproj is not available with" in err


def test_a_chat_sends_images_to_an_endpoint(served: Served, folder, capfd):
    """Send /image with the next question, and refuse locally what is no image."""
    path = str(folder / "shown" / "one.png")
    options = GenerationOptions(8, sampling=SamplingOptions(temperature=0))
    conversation = TerminalConversation(
        RemoteModel(Endpoint.parse(served.url, None), "gemma3"), options, ProgressLine()
    )
    conversation.attach_image(path)
    conversation.ask("What?")
    with api.open_model(folder / "gemma3" / "tiny.gguf", 2, cache=False) as model:
        expected = "".join(model.chat([{"role": "user", "content": "What?", "images": [path]}], 8, temperature=0))
    asked, assistant = conversation.lines
    assert (asked["images"], assistant["content"], conversation.images) == ([path], expected, [])
    with pytest.raises(UsageError, match="expected an image file"):
        conversation.attach_image(__file__)


@pytest.mark.slow
def test_damaged_images_are_answered_or_refused_in_one_line(served: Served, folder):
    """Send 200 files with changed bytes, missing segments or invalid base64."""
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
