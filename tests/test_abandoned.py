"""Answers that nobody wants any more, which the garbage collector ends: nothing hangs, and others get their texts."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

import localllm

TESTS = Path(__file__).parent
SCENARIOS = {
    "chat": {"Exit code 0", "Exit code 1", "Exit code 2"},
    "many": {"With --temp| architecture a of"},
    "candidates": {"I did not|The KV cache"},
    "drafted": {"localllm runs large"},
    "conversation": {"localllm runs"},
    "threads": {"Exit code 0", "Exit code 2", "Exit code 4", "Exit code 6"},
    "tasks": {"localllm runs large language"},
    "served": {"localllm runs large"},
    "forgotten": {"forgotten"},
}


def run(*arguments: str) -> list[str]:
    """The texts that a scenario prints. Fails with the stacks of all threads if it hangs."""
    words = [sys.executable, "-X", "faulthandler", str(TESTS / "abandoned_answers.py"), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    texts: list[str] = json.loads(done.stdout)
    return texts


@pytest.mark.slow(2)
@pytest.mark.sampled("scenario", always=("chat",))
@pytest.mark.parametrize("moment", ["always", "locked"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_garbage_collected_in_the_middle_of_a_call_does_not_hang(scenario: str, moment: str):
    assert set(run(scenario, moment)) == SCENARIOS[scenario]


@pytest.mark.slow(2)
@pytest.mark.parametrize("moment", ["always", "locked"])
def test_an_encoder_beside_abandoned_answers_gives_the_same_vectors(moment: str, model_path):
    assert len(set(run("embed", moment, str(model_path("bert"))))) == 1


def test_a_closed_answer_gives_its_sequence_back_at_once():
    with localllm.open(localllm.builtin_model()) as model:
        answer = model.chat([{"role": "user", "content": "Hi"}], max_tokens=50)
        next(answer)
        answer.close()
        again = model.chat([{"role": "user", "content": "Hi"}], max_tokens=1)
        "".join(again)
        assert (answer.finish_reason, again.cached_tokens > 0) == ("interrupted", True)


@pytest.mark.parametrize("end", ["stop", "close"])
def test_an_answer_can_be_ended_by_another_thread(end: str):
    with localllm.open(localllm.builtin_model()) as model:
        answer, begun, pieces = model.generate("localllm", max_tokens=1500), threading.Event(), list[str]()

        def iterate() -> None:
            for piece in answer:
                pieces.append(piece)
                begun.set()

        thread = threading.Thread(target=iterate)
        thread.start()
        assert begun.wait(30)
        getattr(answer, end)()
        thread.join(30)
        assert not thread.is_alive() and answer.finish_reason in ("interrupted", "stop") and pieces


APPLICATION = """
import localllm, uvicorn, sys
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
model = localllm.open(localllm.builtin_model())
question = [{"role": "user", "content": "What is localllm?"}]
def answer(request):
    tokens = int(request.query_params["tokens"])
    return StreamingResponse(model.chat(question, max_tokens=tokens, temperature=0))
application = Starlette(routes=[Route("/", answer)])
uvicorn.run(application, port=int(sys.argv[1]), log_level="error", timeout_graceful_shutdown=5)
"""


@pytest.mark.slow(6)
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
def test_a_web_application_survives_clients_that_leave():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(port)], env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        texts, problems = list[str](), list[BaseException]()

        def ask(leaves: bool) -> None:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("GET", f"/?tokens={400 if leaves else 5}")
                response = connection.getresponse()
                if leaves:
                    response.read(10)
                else:
                    texts.append(response.read().decode())
            except BaseException as error:
                problems.append(error)
            finally:
                connection.close()

        until_listening(port)
        clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(16)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(90)
        assert (problems, set(texts), len(texts)) == ([], {"localllm runs large language models"}, 8)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) is not None
    finally:
        server.kill()


def until_listening(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the application does not listen")
