"""Test abandoned answers that the garbage collector ends: nothing hangs, and others get their texts."""

import json
import subprocess
import sys
import threading

import pytest
from project import ROOT, SUPPORT

import localllm

sys.path.insert(0, str(ROOT / "scripts" / "platform"))

import check_fastapi

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
    """Return the texts printed by a scenario; fail with all threads' stacks if it hangs."""
    words = [sys.executable, "-X", "faulthandler", str(SUPPORT / "abandoned_answers.py"), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    texts: list[str] = json.loads(done.stdout)
    return texts


@pytest.mark.slow(2)
@pytest.mark.sampled("scenario", always=("chat",))
@pytest.mark.parametrize("moment", ["always", "locked"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_garbage_collection_within_a_call_does_not_hang(scenario: str, moment: str):
    assert set(run(scenario, moment)) == SCENARIOS[scenario]


@pytest.mark.sampled
@pytest.mark.slow(2)
@pytest.mark.parametrize("moment", ["always", "locked"])
def test_embeddings_are_the_same_beside_abandoned_answers(moment: str, model_path):
    assert len(set(run("embed", moment, str(model_path("bert"))))) == 1


def test_a_closed_answer_releases_its_sequence_at_once():
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


@pytest.mark.sampled
@pytest.mark.slow(15)
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
def test_a_web_application_survives_clients_that_disconnect(capsys: pytest.CaptureFixture[str]):
    """Run scripts/platform/check_fastapi.py for ten seconds, which by default runs for ten minutes."""
    pytest.importorskip("fastapi")
    assert check_fastapi.check(str(localllm.builtin_model()), 10, 16) == []
    assert "answers read" in capsys.readouterr().out
