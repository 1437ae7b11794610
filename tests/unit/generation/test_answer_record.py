"""Test answers as plain data: read without iterating, pickled and copied; tokenizers pickle as their files."""

import asyncio
import copy
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from talker import open_talker
from tiny_model import write_tiny_model

import localllm
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, ModelError, UsageError
from localllm.generation.answer_record import RECORDED_ATTRIBUTES, AnswerRecord
from localllm.services.hub.catalogue import HubReference, MissingError
from localllm.text.tokenizer import Tokenizer

ASKED = [{"role": "user", "content": "hi there"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model that answers with the question in capitals."""
    return open_talker(str(write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf")), EngineOptions(context=512))


@pytest.fixture(scope="module")
def model(tiny: str) -> Any:
    with localllm.open(tiny, cache=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", "HI THERE"), ("finish_reason", "stop"), ("completion_tokens", 8), ("thinking", ""), ("calls", []),
        ("is_full", False), ("dropped", 0), ("cached_tokens", 0),
    ],
)  # fmt: skip
def test_reading_an_attribute_generates_the_answer(talker: Any, name: str, expected: object):
    answer = talker.chat(ASKED)
    value = getattr(answer, name)
    assert value == expected or (name == "completion_tokens" and value > 0) or name == "cached_tokens"
    assert (answer.text, answer.finish_reason, "".join(answer)) == ("HI THERE", "stop", "")


@pytest.mark.parametrize("name", ["tokens", "logprobs", "steps", "decode_s", "ttft_s"])
def test_reading_a_statistic_generates_the_answer(talker: Any, name: str):
    answer = talker.chat(ASKED, top_logprobs=1)
    assert getattr(answer, name) and answer.text == "HI THERE"


def test_message_holds_the_whole_answer(talker: Any):
    assert talker.chat(ASKED).message() == {"role": "assistant", "content": "HI THERE"}


def test_attributes_known_before_the_first_step_generate_nothing(talker: Any):
    answer = talker.chat(ASKED)
    assert answer.prompt and answer.prompt_tokens and answer.seed is not None
    answer.close()
    assert (answer.text, answer.finish_reason) == ("", "interrupted")


def test_attributes_during_iteration_are_those_so_far(talker: Any):
    answer, texts = talker.chat(ASKED), list[str]()
    for piece in answer:
        texts.append(answer.text)
        assert answer.text.endswith(piece)
    assert len(texts) > 1 and texts == sorted(texts, key=len) and texts[0] != "HI THERE"
    left = talker.chat(ASKED)
    next(left)
    assert left.finish_reason == "interrupted" and left.text != "HI THERE"


def test_reading_an_attribute_raises_the_errors_of_a_step(talker: Any):
    answer = talker.chat(ASKED, logits_processor=lambda ids, row: row[:2])
    with pytest.raises(UsageError, match="logits_processor must return"):
        _ = answer.text


def test_reading_the_result_of_a_tool_run_runs_the_tools(talker: Any):
    def add(a: int) -> int:
        """Add."""
        return a

    run = talker.run_tools(ASKED, [add])
    assert run.text == "HI THERE"
    assert [message["content"] for message in talker.run_tools(ASKED, [add]).messages] == ["HI THERE"]
    for again in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert (again.text, again.finish_reason, again.messages) == (run.text, "stop", run.messages)


def test_reading_an_asynchronous_answer_explains_how_to_await_it(talker: Any):
    async def ask() -> None:
        answer = talker.achat(ASKED)
        with pytest.raises(AttributeError, match="or await complete"):
            _ = answer.text
        with pytest.raises(TypeError, match="await complete"):
            pickle.dumps(answer)
        done = await answer.complete()
        assert done.text == answer.text == "HI THERE"
        assert pickle.loads(pickle.dumps(answer)).text == (await talker.acomplete(ASKED)).text == "HI THERE"

    asyncio.run(ask())


def results_of(model: Any) -> dict[str, Any]:
    """Return one result of each type."""
    return {
        "generate": model.generate("Once", max_tokens=3, seed=1, top_logprobs=2),
        "map": next(model.map(["Once"], max_tokens=3, seed=1, top_logprobs=2)),
        "schema": next(model.map(["Once"], max_tokens=9, seed=1, schema=NUMBER)),
    }


@pytest.mark.parametrize("kind", ["generate", "map", "schema"])
@pytest.mark.parametrize("how", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_answers_are_pickled_and_copied_as_plain_data(model: Any, kind: str, how: Any):
    answer = results_of(model)[kind]
    again = how(answer)
    assert isinstance(again, AnswerRecord) and answer.text
    names = set(RECORDED_ATTRIBUTES) - {"ids", "logprob"}
    assert {name: getattr(again, name) for name in names} == {name: getattr(answer, name) for name in names}
    assert again.message()["content"] == again.text and list(again) == []
    assert how(again) == again and pickle.dumps(again) == pickle.dumps(how(again))
    if kind == "schema":
        assert again.parsed == answer.parsed
    else:
        with pytest.raises(UsageError, match="generated without a schema"):
            _ = again.parsed


def test_other_results_are_pickled_and_copied(model: Any):
    results = [
        model.score("Once", " upon"), model.choose("Once", ["a", "b"]), model.logits([1, 2]),
        model.candidates("Once", 2, max_tokens=2, seed=1),
        *model.map(["x" * 300_000], max_tokens=1, errors="return"),
    ]  # fmt: skip
    for result in results:
        for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
            assert type(again) is type(result) and repr(again) == repr(result)
    assert (
        isinstance(results[-1], ContextError) and pickle.loads(pickle.dumps(results[-1])).excess == results[-1].excess
    )
    missing = MissingError(HubReference("hf:a/b", "a/b"))
    assert str(pickle.loads(pickle.dumps(missing))) == str(missing)


def test_a_tokenizer_is_pickled_as_its_file(tiny: str, tmp_path: Path):
    path = Path(shutil.copy(tiny, tmp_path / "t.gguf"))
    tokenizer = Tokenizer.from_file(path)
    data = pickle.dumps(tokenizer)
    assert len(data) < 1000 and str(path).encode() in data
    assert pickle.dumps(Tokenizer.from_file(path)) == data, "so that programs which hash it find what they have cached"
    again = pickle.loads(data)
    assert again.encode("hello world") == tokenizer.encode("hello world")
    assert copy.deepcopy(tokenizer) is copy.copy(tokenizer) is tokenizer
    with localllm.open(path) as opened:
        assert pickle.dumps(opened.tokenizer) == data
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).encode('hello'))"
    process = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert process.stdout.decode().strip() == str(tokenizer.encode("hello"))
    path.unlink()
    with pytest.raises(ModelError, match=r"t\.gguf: the file of a pickled tokenizer no longer exists"):
        pickle.loads(data)


def test_unpickling_a_tokenizer_refuses_a_changed_file(tmp_path: Path):
    path = write_tiny_model(tmp_path / "t.gguf")
    data = pickle.dumps(Tokenizer.from_file(path))
    from models import model, write

    from tests.unit.text.test_wordpiece import PIECES, metadata

    other = model("bert", vocab=len(PIECES), context=64)
    other.metadata.update(metadata())
    write(other, path)
    with pytest.raises(ModelError, match="the vocabulary has changed since the tokenizer was pickled"):
        pickle.loads(data)


def test_pickling_a_tokenizer_without_a_file_explains_why_not():
    from tests.unit.text.test_wordpiece import metadata

    tokenizer = Tokenizer.from_metadata(metadata())
    with pytest.raises(TypeError, match=r"use Tokenizer\.from_file"):
        pickle.dumps(tokenizer)
