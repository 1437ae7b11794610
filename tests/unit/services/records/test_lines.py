"""Records and their prompts, and vectors that are kept: what is asked of each line, what is known of it later."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.engine.options import EngineOptions
from localllm.errors import UsageError
from localllm.generation.embedding import clip_embedder as pair_embedding
from localllm.generation.embedding.embedder import EmbedOptions, ShownImage
from localllm.services.records.lines import Prompts, Record, images_of, read_records
from localllm.services.search import embed
from localllm.services.search.embed import (
    EmbedJob,
    VectorCache,
    file_text,
    files_below,
    fingerprint,
    is_image,
    key_of,
    nearest,
    text_of,
)
from localllm.text import sandbox

# ---- records


def test_ids_of_records():
    lines = b'{"id": "a", "x": 1}\n{"id": 7}\n{"x": 2}\n{"id": "a"}\n{"id": 3}\n'
    first, second, third, double, taken = read_records(lines)
    assert [each.id for each in (first, second, third)] == ["a", 7, 3] and not first.error + second.error + third.error
    assert double.error == "line 4: the id 'a' is that of line 1"
    assert taken.error == "line 5: the id 3 is that of line 3"
    for odd in (b"true", b"1.5", b"null", b"[1]"):
        [record] = read_records(b'{"id": ' + odd + b"}\n")
        assert record.error.startswith("line 1: an id must be a text or a whole number")


def test_lines_that_are_no_records():
    good, number, nan, broken = read_records(b'{"a": 1}\n5\n{"a": NaN}\n{"a"\n')
    assert good.error == "" and number.error == "line 2 is not a JSON object" and number.id == 2
    assert nan.error.startswith("line 3 is not JSON") and broken.error.startswith("line 4 is not JSON")
    plain = read_records(b"a\n\xff\n")
    assert plain[0] == Record(1, "a") and plain[1].error == "line 2 is not UTF-8 at byte 0"
    assert read_records("a\nü\n".encode("utf-16"))[1].input == "ü"
    assert [each.input for each in read_records(b'{"a": 1}\n', "x.ndjson")] == [{"a": 1}]


# ---- prompts


def asked(prompts: Prompts, **fields: Any) -> Any:
    return prompts(Record(1, fields))


def user(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


def test_what_is_asked():
    assert asked(Prompts("Say {a} and {b}"), a="x", b=[1]) == user("Say x and [1]")
    assert Prompts("Say {line}")(Record(1, "x")) == user("Say x") and Prompts()(Record(1, "x")) == user("x")
    assert asked(Prompts(), prompt="p", line="l") == user("p") and asked(Prompts(raw=True), prompt="p") == "p"
    assert asked(Prompts(system="s"), prompt="p") == [{"role": "system", "content": "s"}, *user("p")]
    assert asked(Prompts(), messages=user("m"), prompt="p") == user("m")
    assert asked(Prompts(system="s"), messages=user("m")) == [{"role": "system", "content": "s"}, *user("m")]
    assert asked(Prompts(raw=True), messages=user("m"), prompt="p") == "p"
    assert asked(Prompts(template="{{ a }}!"), a=1) == user("1!")


@pytest.mark.parametrize(("prompts", "fields", "message"), [
    ({"prompt": "{a}"}, {"b": 1}, "there is no field 'a'"), ({}, {"x": 1}, 'has no field "messages" or "prompt"'),
    ({}, {"messages": "x"}, '"messages" must be a list'), ({}, {"messages": [], "image": "x"}, "in \"messages\""),
    ({"raw": True}, {"prompt": "x", "image": "i"}, "images need a chat template"),
    ({}, {"prompt": "x", "image": [""]}, "path of an image"),
])  # fmt: skip
def test_records_that_do_not_have_it(prompts: dict[str, Any], fields: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        asked(Prompts(**prompts), **fields)


def test_prompts_that_make_no_sense():
    for given, message in (({"raw": True, "system": "s"}, "needs a chat template"),
    ({"prompt": "{a}", "template": "x"}, "not both"),
                           ({"prompt": "hello"}, "names no field"),
                           ({"template": "hello\n"}, "names no field"),
                           ({"template": "{% if %}"}, "template is invalid")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            Prompts(**given)
    with pytest.raises(UsageError, match="wrong line"):
        Prompts()(Record(1, "x", "wrong line"))


@pytest.mark.parametrize(
    "given", [{"template": "{{ text }}!", "system": "s"}, {"prompt": "{text}?", "raw": True}, {"system": "s"}]
)
def test_another_process_asks_the_same(given: dict[str, Any]):
    """A compiled template stays here."""
    record, prompts = Record(1, {"text": "a", "line": "b"}), Prompts(**given)
    again = pickle.loads(pickle.dumps(prompts))
    if "text" in str(given):
        assert again(record) == prompts(record)
    assert repr(again) == repr(prompts)


@pytest.mark.parametrize("function", ["compile_template", "render_template"])
def test_a_want_of_memory_is_no_fault_of_a_template(monkeypatch: pytest.MonkeyPatch, function: str):
    def fails(*given: object, **named: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(sandbox, function, fails)
    with pytest.raises(MemoryError):
        Prompts(template="{{ text }}")(Record(1, {"text": "a"}))


def test_images_of_a_record():
    assert asked(Prompts(), prompt="p", image="i") == user("p", images=["i"])
    assert asked(Prompts("{a}"), a="x", image=["i", "j"]) == user("x", images=["i", "j"])
    assert asked(Prompts("{image}"), image="i") == user("i")  # the text names it
    assert asked(Prompts(template="{{ a }}"), a="x", image="i") == user("x", images=["i"])
    assert images_of({}) == images_of({"image": None}) == [] and images_of({"image": ["a"]}) == ["a"]
    for odd in (5, [5], "", [None]):
        with pytest.raises(UsageError, match='"image" must be the path of an image'):
            images_of({"image": odd})


# ---- texts and images to make vectors of


def test_what_a_record_is_known_by(tmp_path: Path):
    assert text_of(Record(1, "line"), "text") == "line" and text_of(Record(1, {"t": "x"}), "t") == "x"
    shown = text_of(Record(1, {"image": "i.png"}), "text")
    assert isinstance(shown, ShownImage) and shown.source == "i.png"
    assert text_of(Record(1, {"image": "i.png", "text": "x"}), "text") == "x"
    assert not is_image(Record(1, "line")) and not is_image(Record(1, {"image": 5}))
    for record, message in (
        (Record(1, {}), 'record 1 has no text field "text"'),
        (Record(1, {"text": 5}), "has no text"),
        (Record(1, "x", "bad"), "bad"),
    ):
        with pytest.raises(UsageError, match=message):
            text_of(record, "text")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\x89PNG")
    keys = {key_of(ShownImage(str(tmp_path / name))) for name in ("a", "b")}
    assert len(keys) == 1 and keys.pop().startswith("\0") and key_of("text") == "text"


def test_files_below_folders(tmp_path: Path):
    for name in ("b/c.txt", "b/a.txt", "b/.hidden", "b/.git/x", "z.txt", ".own/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = files_below(
        [f"{tmp_path}/z.txt", f"{tmp_path}/b", f"{tmp_path}/.own"]
    )  # hidden ones only if they are named
    inside = [str(tmp_path / name) for name in ("b/a.txt", "b/c.txt", ".own/y.txt")]
    assert found == [f"{tmp_path}/z.txt", *inside]
    with pytest.raises(UsageError, match="none: no such file or folder"):
        files_below([f"{tmp_path}/none"])
    assert file_text(f"{tmp_path}/z.txt") == "z.txt"
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(UsageError, match="UTF-8"):
        file_text(f"{tmp_path}/latin")
    with pytest.raises(UsageError, match="cannot be read"):
        file_text(f"{tmp_path}/none")


def test_the_nearest():
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1]], np.float32)
    query = np.array([0, 1], np.float32)
    assert (
        nearest(query, vectors, 3) == [(1, 1.0), (3, 1.0), (2, pytest.approx(0.8))]
        and len(nearest(query, vectors, 9)) == 4
    )


@pytest.mark.parametrize(
    ("is_pair", "sees", "pooling", "made"),
    [
        (False, False, "mean", ("Embedder", "file", "tokenizer of m", "engine", "mean")),
        (False, False, None, ("Embedder", "file", "tokenizer of m", "engine", None)),
        (True, True, None, ("PairEmbedder", "file", "engine")), (True, False, None, ("PairEmbedder", "file", "engine")),
        (True, True, "mean", "pooling cannot be set for a model of images and texts"),
        (False, True, None, "m.gguf: this model cannot embed images; use a CLIP model"),
    ],
)  # fmt: skip
def test_which_model_makes_vectors(monkeypatch: pytest.MonkeyPatch, is_pair: bool, sees: bool, pooling: Any, made: Any):
    """It is closed whatever happens."""
    closed = []

    def maker(name: str) -> Any:
        def make(file: Any, *given: Any) -> Any:
            return SimpleNamespace(
                given=(name, "file" if file is opened else file, *given), close=lambda: closed.append(1)
            )

        return make

    opened: Any = SimpleNamespace(metadata="m", oddities=[])
    monkeypatch.setattr(embed.GGUFFile, "open", lambda path: {"m.gguf": opened}[path])
    monkeypatch.setattr(embed, "is_pair", lambda file: is_pair)
    monkeypatch.setattr(embed, "Tokenizer", SimpleNamespace(from_metadata="tokenizer of {}".format))
    monkeypatch.setattr(embed, "Embedder", maker("Embedder"))
    monkeypatch.setattr(pair_embedding, "PairEmbedder", maker("PairEmbedder"))
    engine: Any = "engine"
    job = EmbedJob("m.gguf", EmbedOptions(), engine, pooling, sees)
    if isinstance(made, str):
        with pytest.raises(UsageError) as failure, embed.embedder(job):
            pass
        assert str(failure.value) == made and not closed
        return
    with pytest.raises(KeyboardInterrupt), embed.embedder(job) as found:
        assert found.given == made and not closed
        raise KeyboardInterrupt
    assert closed == [1]


# ---- vectors that are kept


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbedJob:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes())
    return EmbedJob(str(path), EmbedOptions(), EngineOptions())


class Maker:
    """Vectors of texts, and which were asked for."""

    def __init__(self) -> None:
        self.asked = list[list[str]]()

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.asked.append(texts)
        return np.array([[len(text), ord(text[0]), 1.5] for text in texts], np.float32)


def test_vectors_are_made_once(job: EmbedJob):
    cache, make = VectorCache(job, 3), Maker()
    first = cache.vectors(["aa", "b"], make)
    assert first.tolist() == [[2, 97, 1.5], [1, 98, 1.5]] and cache.found == 0
    assert cache.vectors(["b", "ccc", "aa"], make).tolist() == [[1, 98, 1.5], [3, 99, 1.5], [2, 97, 1.5]]
    assert make.asked == [["aa", "b"], ["ccc"]] and cache.found == 2
    again = VectorCache(job, 3)
    assert again.vectors(["ccc", "aa", "b"], make).tolist() == [[3, 99, 1.5], [2, 97, 1.5], [1, 98, 1.5]]
    assert len(make.asked) == 2 and again.found == 3
    double = VectorCache(job, 3)
    assert double.vectors(["d", "d"], make).tolist() == [[1, 100, 1.5]] * 2
    assert (
        VectorCache(job, 3).vectors(["d", "aa"], make).tolist() == [[1, 100, 1.5], [2, 97, 1.5]]
        and len(make.asked) == 3
    )


def test_a_cache_that_cannot_be_written_costs_only_time(job: EmbedJob, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localllm.services.search.embed.write_checksummed", full)
    cache, make = VectorCache(job, 3), Maker()
    assert cache.vectors(["a"], make).tolist() == cache.vectors(["a"], make).tolist() and len(make.asked) == 1


def test_other_models_and_ways_have_other_vectors(job: EmbedJob, tmp_path: Path):
    def other(**changes: Any) -> EmbedJob:
        given = {"path": job.path, "options": job.options, "engine": job.engine, "pooling": None, **changes}
        return EmbedJob(**given)

    found = [fingerprint(each) for each in (
        job, other(options=EmbedOptions(dims=2)), other(options=EmbedOptions(normalize=False)),
        other(options=EmbedOptions(role="query")),
        other(options=EmbedOptions(overflow="cut")), other(pooling="mean"), other(engine=EngineOptions(context=64)),
    )]  # fmt: skip
    assert len(set(found)) == len(found) and fingerprint(other()) == found[0]
    assert fingerprint(other(engine=EngineOptions(threads=1))) == found[0]  # makes no difference
    data = bytearray(Path(job.path).read_bytes())
    for place in (0, 5, len(data) // 9, len(data) * 4 // 9 + 100, len(data) * 8 // 9 + 8000):
        changed = tmp_path / "changed.gguf"
        changed.write_bytes(bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :]))
        assert fingerprint(other(path=str(changed))) != found[0], place
    changed.write_bytes(bytes(data) + b"x")
    assert fingerprint(other(path=str(changed))) != found[0]
