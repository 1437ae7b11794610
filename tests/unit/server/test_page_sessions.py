"""Test saved conversations of the page: none overwrites another, and each names the model that answered."""

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")

from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.server import page
from localllm.server.http import RejectedRequestError
from localllm.server.model_pool import ModelEntry
from localllm.services import sessions

TURN = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}


@pytest.fixture
def page_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Return functions that handle sessions as the page does; model names the pool's NAME.gguf."""
    for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    body: Any = {}

    async def read_json(request: Any, limits: Any) -> Any:
        return body

    monkeypatch.setattr(page, "read_json", read_json)
    for seed, name in enumerate(("m", "other")):
        write_tiny_model(tmp_path / f"{name}.gguf", seed=seed)
    entries = {name: ModelEntry(name, str(tmp_path / f"{name}.gguf")) for name in ("m", "other")}
    entries["gone"] = ModelEntry("gone", str(tmp_path / "gone.gguf"))
    pool = SimpleNamespace(resolve=entries.__getitem__, entries=entries)
    served: Any = SimpleNamespace(limits=None, pool=pool)

    def write(session: str, *messages: dict[str, str], **fields: Any) -> Any:
        body.clear()
        body.update({"messages": list(messages), **fields})
        request: Any = SimpleNamespace(path_params={"name": session})
        return json.loads(asyncio.run(page.write_session(served, request)).body)["revision"]

    def read(session: str) -> Any:
        request: Any = SimpleNamespace(path_params={"name": session})
        return json.loads(asyncio.run(page.read_session(served, request)).body)

    def rename(session: str, name: str) -> None:
        body.clear()
        body["name"] = name
        asyncio.run(page.rename_session(served, SimpleNamespace(path_params={"name": session})))

    def remove(session: str, revision: str | None) -> None:
        query = {} if revision is None else {"revision": revision}
        asyncio.run(page.remove_session(served, SimpleNamespace(path_params={"name": session}, query_params=query)))

    def search(query: str) -> list[str]:
        reply = asyncio.run(page.list_sessions(served, SimpleNamespace(query_params={"q": query}))).body
        return [each["name"] for each in json.loads(reply)["sessions"]]

    return SimpleNamespace(
        write=write, read=read, rename=rename, remove=remove, search=search, entries=entries, path=tmp_path
    )


def test_the_page_writes_a_session(page_of: Any, monkeypatch: pytest.MonkeyPatch):
    revision = page_of.write("a", *TURN, model="m")
    assert page_of.read("a") == {"messages": [*TURN], "model": "m", "temperature": None, "revision": revision}
    longer = {"role": "system", "content": "Be short"}, *TURN
    assert page_of.write("a", *longer, revision=revision) == page_of.read("a")["revision"] != revision
    assert page_of.read("a")["messages"] == [*longer]
    assert page_of.search("") == ["a"]
    with pytest.raises(UsageError, match="only the first message may have the role system"):
        page_of.write("a", TURN[0], {"role": "system", "content": "Be short"})
    monkeypatch.setattr(page, "MAX_MESSAGES", 2)
    page_of.write("b", *TURN)
    with pytest.raises(UsageError, match="messages must be at most 2"):
        page_of.write("b", *TURN, TURN[0])


@pytest.mark.parametrize("fields", [{}, {"revision": ""}, {"revision": "0123456789abcdef"}])
def test_the_page_does_not_overwrite_another_conversation(page_of: Any, fields: dict[str, str]):
    page_of.write("a", *TURN, model="m")
    with pytest.raises(RejectedRequestError, match="conversation 'a' exists already") as failure:
        page_of.write("a", {"role": "user", "content": "Silver"}, {"role": "assistant", "content": "No"}, **fields)
    assert failure.value.status == 409 and page_of.read("a")["messages"] == [*TURN]


def test_a_session_is_renamed_with_all_that_belongs_to_it(page_of: Any):
    page_of.write("a", *TURN, model="m", temperature=0.5)
    before = sessions.read_session("a")
    page_of.rename("a", "b")
    assert sessions.list_names() == ["b"] and sessions.read_session("b") == before
    page_of.rename("b", "b")
    page_of.write("c", *TURN)
    with pytest.raises(RejectedRequestError, match="conversation 'c' exists already") as failure:
        page_of.rename("b", "c")
    assert failure.value.status == 409 and sorted(sessions.list_names()) == ["b", "c"]
    with pytest.raises(UsageError, match="session 'gone' not found"):
        page_of.rename("gone", "d")
    with pytest.raises(UsageError, match="not a valid session name"):
        page_of.rename("b", "../b")
    with sessions.SessionFile("b"), pytest.raises(UsageError, match="open in another chat"):
        page_of.rename("b", "d")
    assert sorted(sessions.list_names()) == ["b", "c"]


def test_branches_of_a_renamed_session_stay_its_branches(page_of: Any):
    page_of.write("trip", *TURN)
    with sessions.SessionFile("detour") as file:
        file.chat.trunk = "trip"
        file.write([*TURN])
    page_of.rename("trip", "journey")
    assert sessions.list_branches("journey") == sessions.list_branches("detour") == ["detour", "journey"]


def test_a_session_is_deleted_only_in_the_state_that_the_page_knows(page_of: Any):
    revision = page_of.write("a", *TURN)
    for wrong in ("", "0123456789abcdef"):
        with pytest.raises(RejectedRequestError, match="changed elsewhere; nothing was deleted") as failure:
            page_of.remove("a", wrong)
        assert failure.value.status == 409 and sessions.list_names() == ["a"]
    with pytest.raises(UsageError, match="revision, which GET returns, is missing"):
        page_of.remove("a", None)
    with sessions.SessionFile("a"), pytest.raises(UsageError, match="open in another chat"):
        page_of.remove("a", revision)
    page_of.remove("a", revision)
    assert sessions.list_names() == []
    with pytest.raises(UsageError, match="not found"):
        page_of.remove("a", revision)


def test_sessions_are_searched_by_the_words_of_names_and_messages(page_of: Any):
    page_of.write("trip", {"role": "user", "content": "Straße to Rome"}, {"role": "assistant", "content": "Yes"})
    page_of.write("other", *TURN)
    (sessions.get_folder() / "damaged.jsonl").write_text("no session")
    for query, names in (
        ("YES", ["other", "trip"]),
        ("strasse trip", ["trip"]),
        ("hi rome", []),
        ("DAMAGED", ["damaged"]),
    ):
        assert sorted(page_of.search(query)) == names


@pytest.mark.parametrize(
    ("value", "message"), [("hot", "must be a number, not a string"), (float("inf"), "temperature")]
)
def test_an_invalid_temperature_is_refused_and_changes_nothing(page_of: Any, value: object, message: str):
    revision = page_of.write("a", *TURN, temperature=0.5)
    with pytest.raises(UsageError, match=message):
        page_of.write("a", *TURN, revision=revision, temperature=value)
    page_of.write("a", *TURN, revision=revision)
    assert page_of.read("a")["temperature"] == 0.5
    page_of.write("a", *TURN, revision=revision, temperature=None)
    assert page_of.read("a")["temperature"] is None and sessions.read_session("a").settings == {}


def test_the_page_saves_the_model_that_answered(page_of: Any):
    """Save its name and weights as `localllm chat` does; report another model that continues."""
    revision = page_of.write("a", *TURN, model="m")
    with GGUFFile.open(page_of.entries["m"].path) as file:
        expected = sessions.describe_model(file)
    assert sessions.read_session("a").model == expected and expected.fingerprint
    revision = page_of.write("a", *TURN, *TURN, revision=revision, model="other")
    assert sessions.read_session("a").model.path == page_of.entries["other"].path
    page_of.write("a", *TURN, revision=revision)
    assert sessions.read_session("a").model.path == page_of.entries["other"].path, "nobody answered"
    page_of.write("b", *TURN, model="gone")
    assert sessions.read_session("b").model == sessions.SessionModel("gone", page_of.entries["gone"].path)


def test_the_page_finds_the_model_of_a_conversation(page_of: Any):
    """Find it by name or file, or report that it is not served."""
    answer = {**TURN[1], "model": "other"}
    page_of.write("a", TURN[0], answer, model="m")
    assert page_of.read("a")["model"] == "other" and page_of.read("a")["messages"] == [TURN[0], answer]
    page_of.write("b", *TURN, model="other")
    assert page_of.read("b")["model"] == "other"
    moved = page_of.path / "moved.gguf"
    os.rename(page_of.entries["other"].path, moved)
    page_of.entries["other"].path = str(moved)
    assert page_of.read("b")["model"] == "other"
    del page_of.entries["other"]
    assert page_of.read("b")["model"] == sessions.read_session("b").model.name


def test_sessions_have_the_same_model_by_weights_or_file():
    first, moved = sessions.SessionModel("m", "/m.gguf", "1"), sessions.SessionModel("x", "/x.gguf", "1")
    assert first.is_same(moved) and not first.is_same(sessions.SessionModel("m", "/m.gguf", "2"))
    assert first.is_same(sessions.SessionModel("q", "/m.gguf")) and not first.is_same(sessions.SessionModel("m", "/q"))
