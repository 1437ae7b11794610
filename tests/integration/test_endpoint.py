"""Test --endpoint: pipes, sessions, schemas, tools and receipts with a server, and servers that fail."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import Served, scripted, serving
from terminal import Terminal
from tiny_model import write_tiny_model
from tool_talker import QWEN, ToolTalker

from localllm import api
from localllm.errors import ContextError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.server.guard import AccessRules
from localllm.services.remote.dialect import DIALECTS, OTHER, OutputFormat, build_request
from localllm.services.remote.http import Endpoint, EndpointError
from localllm.services.remote.model import RemoteModel

PROGRAM = [sys.executable, "-m", "localllm"]


class Talking(ToolTalker):
    """A ToolTalker for a batch."""

    bytes_per_token = 0


def open_tool_talker(path: str, context: int) -> api.Model:
    file = GGUFFile.open(path)
    tokenizer = api.load_tokenizer(file)
    engine: Any = Talking(tokenizer, context)
    return api.Model(file, tokenizer, engine)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=4096, chat_template=QWEN))


@pytest.fixture(scope="module")
def server(path: str) -> Iterator[Served]:
    answers = {"person": '{"name":"Ada"}', "think": "<think>Hm.</think>Four."}
    models = {"scripted": lambda: scripted(path, answers), "tools": lambda: open_tool_talker(path, 4096),
              "small": lambda: open_tool_talker(path, 400)}  # fmt: skip
    with serving(models) as served:
        yield served


def ask(command: str, served: Served | str, *arguments: str, text: str = "") -> Any:
    url = served if isinstance(served, str) else served.url
    words = [*PROGRAM, command, "--endpoint", url, *arguments]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)


# ---- what works


def test_run_and_chat_answer_through_pipes(server: Served):
    done = ask("run", server, "-p", "hello", "--temp", "0", text="there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "THERE\n\nHELLO\n", "")
    done = ask("chat", server, "-m", "scripted", text="hello")
    assert done.stdout == "HELLO\n"
    result = json.loads(ask("run", server, "-p", "hello", "--json", "-s", "7").stdout)
    assert (result["text"], result["finish_reason"], result["seed"]) == ("HELLO", "stop", 7)
    assert result["completion_tokens"] == 5 and result["prompt_tokens"] > 5 and "tokens" not in result
    assert result["model"] == {"endpoint": f"{server.url}/v1", "name": "scripted"}
    assert ask("run", server, "-p", "hello", "--n", "2").stdout == "HELLO\n\nHELLO\n"
    done = ask("run", server, "-p", "hello", "-n", "2")
    assert done.stdout == "HE\n"


def test_constraints_are_applied_by_the_server(server: Served):
    schema = json.dumps({"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]})
    done = ask("run", server, "-p", "person", "--json-schema", schema)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"name": "Ada"})
    done = ask("run", server, "-p", "person", "--json-schema", schema, "-n", "3")
    assert done.returncode == 7 and "the answer was cut" in done.stderr
    assert ask("run", server, "-p", "x", "--regex", "no|maybe").stdout in ("no\n", "maybe\n")
    assert ask("run", server, "-p", "x", "--grammar", 'root ::= "yes"').stdout == "yes\n"


def test_map_answers_many_records_and_resumes(server: Served, tmp_path: Path):
    records, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    records.write_text("".join(f"word {number}\n" for number in range(40)))
    done = ask("map", server, str(records), "-o", str(output))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["output"] for line in lines] == [f"WORD {number}" for number in range(40)]
    output.write_text("".join(output.read_text().splitlines(keepends=True)[:30]))
    assert "\n10 records" in ask("map", server, "scripted", str(records), "-o", str(output), "--stats").stderr
    assert len(output.read_text().splitlines()) == 40
    done = ask("map", server, "-m", "small", text="x" * 5000 + "\nhi\n")
    assert done.returncode == 6
    failed, fine = (json.loads(line) for line in done.stdout.splitlines())
    assert "context" in failed["error"] and fine["output"] == "HI"


def test_replay_asks_the_server_again(server: Served, tmp_path: Path):
    receipt = tmp_path / "r.json"
    assert ask("run", server, "-p", "hello", "--receipt", str(receipt)).returncode == 0
    kept = json.loads(receipt.read_text())
    assert kept["model"]["name"] == "scripted" and kept["options"]["sampling"]["seed"] is not None
    replay = [*PROGRAM, "replay", str(receipt)]
    assert subprocess.run(replay, capture_output=True, text=True).stdout == "the same text\n"
    kept["result"]["text"] = "HELP"
    receipt.write_text(json.dumps(kept))
    done = subprocess.run(replay, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith(
        "the text differs from character 4: it was 'P' and is now 'LO'"
    )


def test_tools_of_an_endpoint_run_locally(server: Served, tmp_path: Path):
    """Use the server's model with this computer's tools and confirmations."""
    (tmp_path / "notes.txt").write_text("Buy milk.\nSleep.\n")
    tools = ["--tools", "read_file", "--allow", str(tmp_path), "--yes", "read_file"]
    done = ask("run", server, "-m", "tools", "-p", "speak", *tools)
    assert (done.returncode, done.stdout) == (0, "It says: Buy milk.\n"), done.stderr
    assert 'tool: read_file {"path": "notes.txt"}' in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_a_session_of_an_endpoint_is_saved_and_continued(server: Served, tmp_path: Path):
    folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_STATE_HOME": str(tmp_path / "state")}
    chat = Terminal("chat", "--endpoint", server.url, "-m", "small", "--session", "far", "--stats", **folders)
    chat.expect("small · endpoint · ")
    chat.prompt()
    for number in range(8):  # more than the context has room for
        assert f"QUESTION {number}" in chat.say(f"question {number} " + "long " * 10)
    assert "first" in chat.seen and "dropped" in chat.seen and "of 400" in chat.seen
    assert "cannot be continued" in chat.say("/continue")
    chat.type("\x04")
    assert chat.end() == 0
    alone = Terminal("chat", "--session", "far", **folders)
    assert alone.end() == 2 and f"resume it with --endpoint {server.url}/v1" in alone.seen
    again = Terminal("chat", "--endpoint", server.url, "-m", "small", "--session", "far", **folders)
    again.expect("session far · 16 messages")
    again.prompt()
    assert "HI" in again.say("hi")
    assert "scripted · endpoint" in again.say("/model scripted")
    again.say("hi")  # or the server may not have opened it
    assert "scripted · endpoint · 4096 tokens of context" in again.say("/model scripted")
    assert "AND NOW" in again.say("and now")
    again.type("\x04")
    assert again.end() == 0


@pytest.mark.slow
def test_an_api_key_is_sent_from_file_or_environment(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving({"scripted": lambda: scripted(path, {})}, AccessRules(keys=("secret-key",))) as served:
        done = ask("run", served, "-p", "hello")
        assert done.returncode == 1 and "needs an API key: set LOCALLLM_API_KEY" in done.stderr
        key = tmp_path / "key"
        key.write_text("secret-key\n")
        assert ask("run", served, "-p", "hello", "--api-key-file", str(key)).stdout == "HELLO\n"
        monkeypatch.setenv("LOCALLLM_API_KEY", "secret-key")
        done = ask("run", served, "-p", "hello")
        assert (done.stdout, done.stderr) == ("HELLO\n", "")
        key.write_text("another\n")
        assert "rejected the API key" in ask("run", served, "-p", "hello", "--api-key-file", str(key)).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "other"], "does not serve model 'other'; available: scripted, tools, small"),
        (["--beams", "2"], "--beams is not available with"),
        (["--on-overflow", "shift"], "--on-overflow=shift is not available with"),
        (["--chat-template", "chatml"], "--chat-template is not available with"),
        (["--speculate", "draft:x.gguf"], "must not name a draft model with --endpoint"),
    ],
)
def test_unsupported_options_are_refused_by_name(server: Served, arguments: list[str], message: str):
    done = ask("run", server, "-p", "hello", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_options_of_local_models_are_ignored(server: Served):
    done = ask("run", server, "-p", "hello", "-t", "1", "-ngl", "3")
    assert done.stdout == "HELLO\n" and "ignored (no effect with --endpoint): -t, -ngl" in done.stderr


@pytest.mark.parametrize("url", ["", "x", "ftp://x", "http://", "http://a:b@c", "http://x:99999", "http://x/?a=b"])
def test_invalid_endpoints_are_refused(url: str):
    with pytest.raises(UsageError, match="endpoint must be the URL"):
        Endpoint.parse(url)


def test_requests_have_the_fields_of_each_server():
    options = GenerationOptions(5, ("x",), SamplingOptions(temperature=0.5, top_k=3, repeat_penalty=1.1), think="off")
    asked = build_request(options, OutputFormat(schema={"type": "object"}), DIALECTS["vllm"])
    assert asked["repetition_penalty"] == 1.1 and asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert build_request(options, OutputFormat(), DIALECTS["localllm"])["think"] == "off"
    with pytest.raises(
        UsageError, match="top_k is not available with this endpoint: a server with OpenAI's API does not"
    ):
        build_request(options, OutputFormat(), OTHER)
    with pytest.raises(UsageError, match="regex is not available with this endpoint: llama-server"):
        build_request(options, OutputFormat(regex="x"), DIALECTS["llamacpp"])
    with pytest.raises(UsageError, match="logits_processor is not available with this endpoint"):
        build_request(GenerationOptions(logits_processor=lambda ids, row: row), OutputFormat(), DIALECTS["localllm"])


# ---- servers that go wrong


MODELS = {"data": [{"id": "m", "owned_by": "somebody"}]}
FINE = (b'data: {"choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')  # fmt: skip
Reaction = Callable[[BaseHTTPRequestHandler, int], None]


def reply_with(status: int, body: bytes, kind: str = "application/json", **headers: str) -> Reaction:
    def react(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return react


@contextmanager
def serve_reactions(*reactions: Reaction, loads: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """Run a server with one reaction after another, the last forever; yield its address and requests.

    loads: how often it reports that it is loading its model.
    """
    asked, loading = list[Any](), list[int]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            loading.append(1)
            is_there = len(loading) > loads
            reply_with(200 if is_there else 503, json.dumps(MODELS).encode(), Retry_After="0")(self, 0)

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reactions[min(len(asked), len(reactions)) - 1](self, len(asked))

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


STREAM = "text/event-stream"
BUSY = reply_with(429, b'{"error": {"message": "slow down"}}', Retry_After="0")
WRONG = [
    (reply_with(401, b'{"error": {"message": "no"}}'), "needs an API key: set LOCALLLM_API_KEY"),
    (reply_with(404, b'{"error": {"message": "no such model"}}'), r"rejected the request \(404\): no such model"),
    (BUSY, r"rejected the request \(429\): slow down"),
    (reply_with(500, b"oh no"), r"rejected the request \(500\): the server gave no reason"),
    (reply_with(302, b"", Location="http://elsewhere"), r"rejected the request \(302\)"),
    (reply_with(200, b"{}"), "does not stream: expected text/event-stream, found application/json"),
    (reply_with(200, b"data: {oops\n\n", STREAM), "sent an invalid JSON object: '{oops'"),
    (reply_with(200, b"data: [1]\n\n", STREAM), "sent an invalid JSON object"),
    (
        reply_with(200, FINE.partition(b"\n\n")[0] + b"\n\n", STREAM),
        "closed the connection before the end of the answer",
    ),
    (reply_with(200, b"data: [DONE]\n\n", STREAM), "closed the connection before the end of the answer"),
    (reply_with(200, b'data: {"error": {"message": "out of memory"}}\n\n', STREAM), "out of memory"),
    (reply_with(200, FINE, STREAM, Content_Encoding="x"), None),
    (reply_with(200, b'data: {"choices": [5, {"delta": {"tool_calls": [7]}}]}\n\n' + FINE, STREAM), None),
]


@pytest.mark.parametrize(("reaction", "message"), WRONG)
def test_a_failing_server_is_reported_in_one_line(
    reaction: Reaction, message: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("localllm.services.remote.http.sleep", lambda seconds: None)
    with serve_reactions(reaction) as (url, _):
        session = RemoteModel(Endpoint.parse(url)).session
        if message is None:
            assert "".join(session.ask("Hi")) == "Hello" and session.messages[-1]["content"] == "Hello"
            return
        with pytest.raises(EndpointError, match=message):
            "".join(session.ask("Hi"))


def test_a_busy_server_is_asked_again():
    with serve_reactions(BUSY, BUSY, reply_with(200, FINE, STREAM), loads=2) as (url, asked):
        assert ask("run", url, "-p", "Hi").stdout == "Hello\n"
        assert len(asked) == 3 and asked[0] == asked[2]


def test_text_received_before_a_broken_connection_is_kept():
    half = reply_with(200, FINE.partition(b"\n\n")[0] + b"\n\n", STREAM)
    with serve_reactions(half) as (url, _):
        done = ask("run", url, "-p", "Hi")
        assert done.returncode == 1 and done.stdout.startswith("Hello")
        assert "closed the connection before the end" in done.stderr and done.stderr.count("\n") == 1


def test_a_silent_server_times_out():
    with serve_reactions(lambda handler, number: time.sleep(2)) as (url, _):
        place = Endpoint(Endpoint.parse(url).url, seconds=0.3)
        with pytest.raises(EndpointError, match=r"no data for 0.3 seconds"):
            "".join(RemoteModel(place).session.ask("Hi"))


def test_an_unreachable_server_is_reported():
    done = ask("run", "http://127.0.0.1:9", "-p", "Hi")
    assert done.returncode == 1 and "http://127.0.0.1:9/v1 cannot be reached: Connection refused" in done.stderr


def test_a_prompt_beyond_the_servers_context_is_an_error(server: Served):
    done = ask("run", server, "-m", "small", text="x" * 5000)
    assert done.returncode == 4 and "context" in done.stderr
    too_long = b'{"error": {"message": "This model\'s maximum context length is 10 tokens."}}'
    with serve_reactions(reply_with(400, too_long)) as (url, _), pytest.raises(ContextError):
        RemoteModel(Endpoint.parse(url)).session.ask("Hi")


def test_escape_sequences_of_a_server_do_not_reach_a_terminal():
    evil = FINE.replace(b"Hello", b"\\u001b[31mred\\u0007")
    with serve_reactions(reply_with(200, evil, STREAM)) as (url, _):
        run = Terminal("run", "--endpoint", url, "-p", "Hi")
        assert run.end() == 0 and "\x1b[31m" not in run.seen and "red" in run.seen
