"""Test localllm serve: OpenAI's API, concurrent callers, and models that are loaded and unloaded."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import numpy as np
import pytest
from project import ROOT
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm import api, builtin_model
from localllm.cli.commands.serve import read_api_keys
from localllm.cli.options.one_shot import EndpointFlags
from localllm.files.cache import prefix_files
from localllm.generation.chunked_prefill import LIVE_CHUNK
from localllm.generation.constraints.constraint import Constraint
from localllm.generation.request import DrawnToken
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.acceptance import DraftSelector
from localllm.server.worker import Subscriber

GUIDE = str(builtin_model())
QUESTIONS = ["What is a GGUF file?", "How do I stop an answer?", "Which commands are there?", "What is Q4_K_M?"]
SCRIPT = {"long": "abcdefgh " * 40, "json": '{"a":1}', "stop": "one two END three", "think": "<think>Hm.</think>Yes."}


def until(condition) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def guide():
    with serving({"guide": GUIDE}) as served:
        yield served


@pytest.fixture
def server(tmp_path):
    """Run a server whose model answers by SCRIPT."""
    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    with serving({"scripted": lambda: scripted(path, SCRIPT)}) as served:
        yield served


def in_chunks(events: list, index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_answers_equal_those_of_the_python_api(guide: Served):
    """Send 16 concurrent requests with their own seeds, half of them streaming."""
    with api.open_model(GUIDE, 2) as model:
        expected = [
            model.chat([{"role": "user", "content": QUESTIONS[n % 4]}], 12, temperature=1.3, seed=n) for n in range(16)
        ]
        texts = ["".join(answer) for answer in expected]

    def ask(n: int) -> str:
        reply = guide.chat(QUESTIONS[n % 4], max_tokens=12, temperature=1.3, seed=n, stream=n % 2 == 1)
        assert reply.status == 200
        return in_chunks(reply.events) if n % 2 else reply.json["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(ask, range(16))] == texts
    assert len(set(texts)) >= len(QUESTIONS[:4])


def test_a_single_request_with_drafts_gives_the_same_text(guide: Served):
    text = "What is a GGUF file? " * 6
    with api.open_model(GUIDE, 2) as model:
        expected = "".join(model.chat([{"role": "user", "content": text}], 40, temperature=0, speculate="off"))
    reply = guide.chat(text, max_tokens=40, temperature=0).json
    assert reply["choices"][0]["message"]["content"] == expected


def test_n_answers_are_counted_in_usage(server: Served):
    reply = server.chat("hello", n=3).json
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["HELLO"] * 3
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    usage = reply["usage"]
    assert usage["completion_tokens"] == 15 and usage["total_tokens"] == usage["prompt_tokens"] + 15


def test_streams_have_indices_usage_and_an_end(server: Served):
    reply = server.chat("hello", n=2, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    *events, last = reply.events
    assert [in_chunks(events, index) for index in (0, 1)] == ["HELLO"] * 2
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_stop_and_max_tokens_set_the_finish_reason(server: Served):
    choice = server.chat("stop", stop=["END"]).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two ", "stop")
    choice = server.chat("long", max_completion_tokens=4).json["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["content"]) == 4


def test_reasoning_is_returned_apart(tmp_path):
    path = str(write_tiny_model(tmp_path / "thinks.gguf", chat_template=THINKS))
    with serving({"thinks": lambda: scripted(path, SCRIPT)}) as served:
        message = served.chat("think").json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        deltas = [event["choices"][0]["delta"] for event in served.chat("think", stream=True).events]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert served.chat("think").json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


THINKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> </think> #}"
)


def test_logprobs_belong_to_the_tokens(guide: Served):
    reply = guide.chat(QUESTIONS[0], max_tokens=6, temperature=0, logprobs=True, top_logprobs=2).json["choices"][0]
    content = reply["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == reply["message"]["content"]
    for entry in content:
        best, second = entry["top_logprobs"]
        assert (best["token"], best["logprob"]) == (entry["token"], entry["logprob"])
        assert second["logprob"] <= best["logprob"] < 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
    events = guide.chat(QUESTIONS[0], max_tokens=6, temperature=0, logprobs=True, stream=True).events
    stream_chunks = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [entry["token"] for entry in stream_chunks] == [entry["token"] for entry in content]


def test_logprobs_with_drafts_equal_those_of_the_model(guide: Served, monkeypatch):
    """Accept several tokens in a step, each with its own logits."""
    leaps, step = list[int](), Scheduler.step

    def counted(batch: Scheduler) -> Iterator[DrawnToken]:
        outputs = [*step(batch)]
        leaps.append(len(outputs))
        yield from outputs

    monkeypatch.setattr(Scheduler, "step", counted)
    prompt = "one two three four five six seven eight " * 6
    asked = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    reply = guide.post("/v1/completions", asked).json["choices"][0]
    logprobs = reply["logprobs"]["token_logprobs"]
    with api.open_model(GUIDE, 2) as model:
        ids = model.tokenize(prompt)
        answer = list(model.generate(ids, 32, temperature=0, ignore_eos=True, speculate="off"))
        assert "".join(answer) == reply["text"]
        written = model.tokenize(reply["text"])
        rows = model.sequence().append([*ids, *written], "all")[len(ids) - 1 : -1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    expected = [row[token] - np.log(np.exp(row).sum()) for row, token in zip(rows, written, strict=True)]
    assert len(logprobs) == 32 and max(leaps) > 1
    np.testing.assert_allclose(logprobs, expected, atol=2e-3)


def test_logit_bias_bans_a_token(guide: Served):
    first = guide.chat(QUESTIONS[0], max_tokens=1, temperature=0).json["choices"][0]["message"]["content"]
    [token] = guide.model().tokenize(first)
    other = guide.chat(QUESTIONS[0], max_tokens=1, temperature=0, logit_bias={str(token): -100}).json
    assert other["choices"][0]["message"]["content"] != first


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_response_formats_constrain_the_answer(guide: Served):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = guide.chat("Who?", response_format=wanted, max_tokens=60, seed=1).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
    choice = guide.chat("What?", response_format={"type": "json_object"}, max_tokens=4, seed=1).json["choices"][0]
    assert choice["message"]["content"].startswith("{")
    assert guide.chat("What?", response_format={"type": "json_schema", "json_schema": {"schema": 3}}).status == 400
    refused = guide.chat("What?", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}})
    assert refused.status == 400 and "schema" in refused.json["error"]["message"]


def test_completions_equal_those_of_the_python_api(guide: Served):
    with api.open_model(GUIDE, 2) as model:
        expected = ["".join(model.generate(prompt, 6, temperature=0)) for prompt in ("GGUF is", "What is")]
        ids = model.session.complete("What is").prompt
    body = {"prompt": ["GGUF is", "What is"], "max_tokens": 6, "temperature": 0, "logprobs": 1}
    choices = guide.post("/v1/completions", body).json["choices"]
    assert [choice["text"] for choice in choices] == expected
    assert ["".join(choice["logprobs"]["tokens"]) for choice in choices] == expected
    assert choices[0]["logprobs"]["text_offset"][:1] == [0]
    reply = guide.post("/v1/completions", {**body, "prompt": ids, "stream": True, "logprobs": None})
    assert "".join(event["choices"][0]["text"] for event in reply.events) == expected[1]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_scores_the_prompt(guide: Served, max_tokens: int):
    """Send token ids as lm-evaluation-harness does, one log probability per id."""
    text = "GGUF is a format of files, and one two three. " * 12
    with api.open_model(GUIDE, 2) as model:
        ids = model.tokenize(text)
        sequence = model.sequence()
        parts = [sequence.append(ids[place : place + 50], "all") for place in range(0, len(ids), 50)]
        rows = np.concatenate(parts).astype(np.float64)
        tail = "".join(model.generate(ids, max_tokens, temperature=0, ignore_eos=True)) if max_tokens else ""
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    expected = rows[np.arange(len(ids) - 1), ids[1:]]
    body = {"prompt": [ids, text], "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens}
    body |= {"ignore_eos": True}
    for choice in guide.post("/v1/completions", body).json["choices"]:
        assert choice["text"] == text + tail
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + max_tokens and "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(ids)], expected, atol=2e-3)
        pairs = [*zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)][1 : len(ids)]
        is_greedy = [one == max(top.values()) for one, top in pairs]
        assert is_greedy == (rows[:-1].argmax(axis=1) == ids[1:]).tolist()
        assert logprobs["text_offset"] == [
            len("".join(logprobs["tokens"][:place])) for place in range(len(logprobs["tokens"]))
        ]
        if max_tokens == 4:  # lm-evaluation-harness leaves out the last entry, whatever is written
            with api.open_model(GUIDE, 2) as model:
                whole = [*ids, *model.tokenize("".join(model.generate(ids, 9, temperature=0)))]
            asked = {**body, "prompt": whole, "max_tokens": 1, "ignore_eos": False}
            (ended,) = guide.post("/v1/completions", asked).json["choices"]
            assert ended["finish_reason"] == "stop" and len(ended["logprobs"]["tokens"]) == len(whole) + 1
            assert ended["logprobs"]["token_logprobs"][-1] == max(ended["logprobs"]["top_logprobs"][-1].values())
    streamed = guide.post("/v1/completions", {**body, "prompt": text, "stream": True, "logprobs": None})
    assert "".join(event["choices"][0]["text"] for event in streamed.events) == text + tail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 99}, "n"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_invalid_fields_are_refused_by_name(server: Served, fields: dict, param: str | None):
    reply = server.chat("x", **fields)
    error = reply.json["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert param is None or error["param"] == param, error


def test_an_unknown_model_or_path_is_404(server: Served):
    missing = server.get("/v1/models/gpt-99")
    assert missing.status == 404 and missing.json["error"]["code"] == "model_not_found"
    assert "scripted" in missing.json["error"]["message"]
    assert server.get("/v1/models/scripted").json["id"] == "scripted"


def test_ignored_fields_are_named_in_a_header(server: Served):
    reply = server.chat("x", user="me", crystal_ball=True)
    assert reply.status == 200 and reply.headers["x-localllm-ignored"] == "crystal_ball"


def test_a_prompt_beyond_the_context_names_both_lengths(tmp_path):
    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    with serving({"scripted": lambda: scripted(path, SCRIPT, context=64)}) as served:
        reply = served.chat("x" * 100)
        assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"
        tokens = len(served.model().session.encode_chat([{"role": "user", "content": "x" * 100}]))
        assert f"{tokens} tokens" in reply.json["error"]["message"] and "64" in reply.json["error"]["message"]
        assert served.chat("x").status == 200


def test_the_oldest_turns_are_dropped_on_request(tmp_path):
    """Drop as few as necessary, never the system message, and tell the client."""
    from localllm.server.http import ClientLimits

    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    system = {"role": "system", "content": "Be brief."}
    turns = [
        each
        for word in "abcdefgh"
        for each in ({"role": "user", "content": word * 20}, {"role": "assistant", "content": word * 20})
    ]
    with serving({"scripted": lambda: scripted(path, SCRIPT, 400)}, limits=ClientLimits(drops_turns=True)) as served:
        reply = served.post(
            "/v1/chat/completions", {"messages": [system, *turns, {"role": "user", "content": "hello"}]}
        )
        assert reply.json["choices"][0]["message"]["content"] == "HELLO"
        dropped = int(reply.headers["x-localllm-dropped-turns"])
        read = served.model().detokenize(served.model().engine.sequences[-1].tokens, special=True)
        assert 1 <= dropped < 8 and "Be brief." in read
        assert [word * 20 in read for word in "abcdefgh"] == [False] * dropped + [True] * (8 - dropped)
        assert 300 < reply.json["usage"]["prompt_tokens"] <= 350
        assert "x-localllm-dropped-turns" not in served.chat("hello").headers
        assert served.chat("x" * 500).status == 400


@pytest.mark.slow
def test_a_disconnected_client_ends_its_answer(server: Served):
    """Disconnect within a step, streaming or not; continue the others."""
    server.chat("x")
    engine = server.model().engine
    for stream in (True, False):
        engine.gate.clear()
        connection = HTTPConnection("127.0.0.1", server.port)
        body = {"messages": [{"role": "user", "content": "long"}], "stream": stream}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: server.service.pool.count_requests()[0])
        connection.sock.close()
        connection.close()
        time.sleep(0.3)  # the server hears of it while the engine is in the middle of a step
        before = len(engine.steps)
        engine.gate.set()
        until(lambda: server.service.pool.count_requests() == (0, 0))
        assert len(engine.steps) <= before + 2
    assert server.chat("x").status == 200
    assert "localllm_requests_left_total 2" in server.get("/metrics").body.decode()


def test_streaming_does_not_wait_for_other_prompts(server: Served):
    """Prefill a few of their tokens beside each step."""
    server.chat("x")
    engine = server.model().engine
    with ThreadPoolExecutor(2) as threads:
        engine.gate.clear()
        long = threads.submit(server.chat, "long")
        until(lambda: server.service.pool.count_requests()[0])
        before = len(engine.steps)
        other = threads.submit(server.chat, "y" * 90)
        until(lambda: sum(server.service.pool.count_requests()) == 2)
        engine.gate.set()
        assert long.result().status == other.result().status == 200
    beside = [step[0] for step in engine.steps[before:] if len(step) == 2 and step[0] > 1]
    assert len(beside) >= 2 and max(beside) <= LIVE_CHUNK and sum(beside) > 90  # each beside a token of the other


def test_a_conversation_reuses_its_prefix(guide: Served):
    """Prefill no earlier turn again, with another caller in between.

    Both prompts select the same kernels. The answer is prefilled again, by the kernels of prompts, as if the client had
    written it.
    """
    messages = [{"role": "user", "content": " ".join(QUESTIONS * 3)}]
    first = guide.post("/v1/chat/completions", {"messages": messages, "max_tokens": 10, "temperature": 0}).json
    guide.chat("Something else entirely", max_tokens=4)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = guide.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0}).json
    assert 64 < first["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"] <= 128
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]


def test_an_error_in_the_engine_reaches_the_waiting_client(server: Served):
    server.chat("x")
    server.model().engine.fail = RuntimeError("secret words")
    reply = server.chat("hello")
    assert reply.status == 500 and "secret" not in reply.body.decode()
    assert server.chat("hello").json["choices"][0]["message"]["content"] == "HELLO"


def test_models_share_the_memory(tmp_path):
    """Unload the least recently used model, and load it again on demand."""
    paths = {name: str(write_tiny_model(tmp_path / f"{name}.gguf")) for name in ("a", "b", "c")}
    each = 300_000_000 + 1_000_000
    with serving(paths, memory=2 * each + 50_000_000) as served:
        state = lambda: [book.worker is not None for book in served.service.pool.entries.values()]  # noqa: E731
        for name, there in (("a", [1, 0, 0]), ("b", [1, 1, 0]), ("a", [1, 1, 0]), ("c", [1, 0, 1]), ("b", [0, 1, 1])):
            assert served.chat("x", model=name, max_tokens=1).status == 200
            assert state() == [bool(each) for each in there]


def test_a_server_opens_a_model_larger_than_its_memory(tmp_path):
    paths = {name: str(write_tiny_model(tmp_path / f"{name}.gguf")) for name in ("a", "b")}
    with serving(paths, memory=10) as served:
        for name in ("a", "b"):
            assert served.chat("x", model=name, max_tokens=1).status == 200
            assert [entry.name for entry in served.service.pool.entries.values() if entry.worker] == [name]


def test_a_full_queue_refuses_requests(server: Served):
    server.chat("x")
    worker = server.service.pool.resolve(None).worker
    worker._max_waiting = 1
    worker.model.engine.gate.clear()
    with ThreadPoolExecutor(20) as pool:
        replies = [pool.submit(server.chat, "hello") for _ in range(20)]
        until(lambda: sum(reply.done() for reply in replies) >= 2)
        worker.model.engine.gate.set()
        statuses = sorted(reply.result().status for reply in replies)
    assert statuses[0] == 200 and statuses[-1] == 503


def test_an_answer_has_a_time_limit(tmp_path):
    from localllm.server.http import ClientLimits

    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    with serving({"scripted": lambda: scripted(path, SCRIPT)}, limits=ClientLimits(answer_seconds=0.3)) as served:
        assert served.chat("x").status == 200
        served.model().engine.gate.clear()
        reply = served.chat("long")
        assert reply.status == 504 and "0.3 seconds" in reply.json["error"]["message"]
        served.model().engine.gate.set()
        until(lambda: served.service.pool.count_requests() == (0, 0))


def test_health_props_and_metrics_describe_the_server(server: Served):
    assert server.get("/health").json["status"] == "ok"
    server.chat("hello")
    [model] = server.get("/props").json["models"]
    assert model["context"] == 4096 and "im_start" in model["chat_template"]
    text = server.get("/metrics").body.decode()
    assert 'localllm_http_requests_total{path="/v1/chat/completions",status="200"} 1' in text
    assert "localllm_tokens_written_total 5" in text
    assert "localllm_first_token_seconds_count 1" in text and "localllm_between_tokens_seconds_count 5" in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


# ---- the command


def test_without_the_extra_serve_explains_what_to_install(cli, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    code, out, err = cli("serve", GUIDE)
    assert (code, out) == (1, "") and err == "localllm: error: serve needs uvicorn: pip install 'localllm[serve]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host lets other computers connect: add --api-key-file FILE"),
        (["--memory", "much"], "--memory: must be a size in bytes, such as 500M or 8G, not 'much'"),
        (["a=" + GUIDE, "a=" + GUIDE], "two models are named a"),
        (["no-such-model"], "no-such-model"),
        (["--port", "99999999"], "cannot listen on"),
    ],
)
def test_invalid_options_of_serve_are_refused(cli, arguments: list, message: str):
    code, out, err = cli("serve", *arguments)
    assert code and out == "" and message in err and err.count("\n") == 1


def test_keys_come_from_a_file(cli, tmp_path):
    file = tmp_path / "keys"
    for text, message in (
        ("\n", "must have at least one key"),
        ("# a laptop\n\n", "must have at least one key"),
        ("short\n", "at least 8 characters"),
    ):
        file.write_text(text)
        assert message in cli("serve", GUIDE, "--api-key-file", file)[2]


def test_comments_in_a_key_file_are_ignored(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# the laptop's\n\n  correct horse  \n#12345678\nbattery staple\n")
    file.chmod(0o600)
    assert read_api_keys(str(file)) == ("correct horse", "battery staple")
    assert EndpointFlags(endpoint="http://127.0.0.1:1", api_key_file=str(file)).parse_endpoint().key == "correct horse"


# The server, which is asked to end a moment after it listens: by SIGTERM, on Windows by Ctrl-Break.
ENDING = """
import signal, threading
from localllm.cli.commands import serve
from localllm.cli.main import main
from localllm.system.processes import list_ending_signals
tell = serve.print_ready
def told(setup, address):
    tell(setup, address)
    threading.Timer(0.5, signal.raise_signal, [list_ending_signals()[-1]]).start()
serve.print_ready = told
main()
"""


@pytest.mark.slow
def test_a_termination_signal_ends_the_server():
    command = [sys.executable, "-c", ENDING, "serve", GUIDE, "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("\n") == 1 and "Ctrl-C stops the server" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path, number: int):
    """Finish the running answer first."""
    place = tmp_path / "socket"
    command = [sys.executable, "-m", "localllm", "serve", GUIDE, "--socket", str(place)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        try:
            line = process.stderr.readline().decode()
            assert line == f"localllm: serving guide at {place}; Ctrl-C stops the server\n", (
                line + process.stderr.read().decode()
            )
            assert os.stat(place).st_mode & 0o777 == 0o600
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60)
                client.connect(str(place))
                body = json.dumps({"prompt": "What is", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                begun = client.recv(4096)
                process.send_signal(number)
                while piece := client.recv(1 << 16):
                    begun += piece
            assert begun.startswith(b"HTTP/1.1 200") and b"[DONE]" in begun
            assert process.wait(30) == (0 if number == signal.SIGTERM else 130)
            assert not place.exists()
        finally:
            process.kill()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")
def test_a_file_at_the_sockets_path_is_kept(cli, tmp_path):
    place = tmp_path / "file"
    place.write_text("mine")
    code, _, err = cli("serve", GUIDE, "--socket", place)
    assert code == 2 and "exists and is not a socket" in err and place.read_text() == "mine"


def test_constraints_are_compiled_outside_the_batch(guide: Served, monkeypatch):
    """Keep running answers from waiting for the vocabulary."""
    threads = list[str]()
    beginning = Constraint.create_matcher
    monkeypatch.setattr(
        Constraint,
        "create_matcher",
        lambda self, words: threads.append(threading.current_thread().name) or beginning(self, words),
    )
    schema = {"type": "object", "properties": {"fresh": {"type": "boolean"}}, "required": ["fresh"]}
    guide.chat("x", response_format={"type": "json_schema", "json_schema": {"schema": schema}}, max_tokens=20)
    assert threads and "answers" not in threads


@pytest.mark.sampled
@pytest.mark.slow
def test_a_real_model_answers_concurrent_requests_as_alone(shared):
    """Send 8 requests, some streaming, some with a common prefix."""
    path = str(shared / "models" / "smollm2-135m-instruct-q4_1.gguf")
    texts = [f"Name {n} colors." if n % 2 else f"What is the capital of {c}?" for n, c in enumerate("ABCDEFGH")]
    with api.open_model(path, 2, cache=False) as model:
        expected = ["".join(model.chat([{"role": "user", "content": text}], 24, seed=7)) for text in texts]
    with serving({"smol": path}) as served, ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda text: served.chat(text, max_tokens=24, seed=7), texts)
        assert [reply.json["choices"][0]["message"]["content"] for reply in replies] == expected


@pytest.mark.slow
def test_the_server_reuses_prefixes_stored_by_run(shared, tmp_path, monkeypatch):
    """Load a whole prompt and the prefix of another from files of an earlier process."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path / "prefixes")
    path = str(shared / "models" / "smollm2-135m-instruct-q4_1.gguf")
    text = "The quick brown fox jumps over the lazy dog. " * 70
    with api.open_model(path, 2) as model:
        expected = "".join(model.generate(text, 8, temperature=0, speculate="off"))
        length = len(model.session.complete(text).prompt)
    assert length > 600
    with serving({"smol": path}) as served:
        for more, least in (("", length), ("And then?", 512)):
            reply = served.post("/v1/completions", {"prompt": text + more, "max_tokens": 8, "temperature": 0}).json
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= least
            assert more or reply["choices"][0]["text"] == expected


def test_an_answer_whose_client_left_at_once_ends(server: Served):
    """Leave no request and no use of a model, even before the response started."""
    import asyncio

    from localllm.generation.options import GenerationOptions
    from localllm.server.http import EventStream
    from localllm.server.openai_chat import stream_chunks
    from localllm.server.service import GenerateRequest

    server.chat("x")
    server.model().engine.gate.clear()

    async def gone() -> None:
        question = GenerateRequest(None, [[{"role": "user", "content": "long"}]], GenerationOptions())
        exchange = await server.service.start(question)
        stream = EventStream(stream_chunks(exchange, question, False), server.service.limits, {}, exchange.close)

        async def send(message: dict) -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await stream({"type": "http"}, asyncio.Event().wait, send)

    asyncio.run_coroutine_threadsafe(gone(), server.loop).result(30)
    server.model().engine.gate.set()
    until(lambda: server.service.pool.count_requests() == (0, 0))
    assert server.service.pool.resolve(None).active_requests == 0


@pytest.mark.slow
def test_finished_answers_leave_no_objects(server: Served):
    """Free subscribers and drafters without the garbage collector."""
    server.chat("x")
    gc.collect()
    gc.disable()
    try:
        for text in ("long", "json", "stop"):
            server.chat(text)
        until(lambda: server.service.pool.count_requests() == (0, 0))
        until(
            lambda: not any(issubclass(type(one), Subscriber | DraftSelector) for one in gc.get_objects())
        )  # no proxy is asked
    finally:
        gc.enable()


def test_the_server_collects_garbage():
    """Restore what short commands turn off."""
    code = "from localllm.server.run import restore_gc\nimport gc\ngc.set_threshold(150_000)\n"
    code += "restore_gc()\nprint(gc.get_threshold(), gc.get_freeze_count() > 1000)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(700, 10, 10) True\n"


def test_samplers_share_their_array_of_ids():
    one, other = (Sampler(SamplingOptions(seed=seed), 50_000) for seed in (1, 2))
    assert one._ids is other._ids and not one._ids.flags.writeable
