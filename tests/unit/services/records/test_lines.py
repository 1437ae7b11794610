"""Test records, their prompts, and cached embeddings."""

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
from localllm.services.records.lines import PromptBuilder, Record, get_images, read_records
from localllm.services.search import embed
from localllm.services.search.embed import (
    EmbedJob,
    VectorCache,
    compute_fingerprint,
    find_nearest,
    get_cache_key,
    get_document,
    is_image,
    list_files,
    read_text_file,
)
from localllm.text import sandbox

# ---- records


def test_record_ids_must_be_unique_strings_or_integers():
    lines = b'{"id": "a", "x": 1}\n{"id": 7}\n{"x": 2}\n{"id": "a"}\n{"id": 3}\n'
    first, second, third, double, taken = read_records(lines)
    assert [each.id for each in (first, second, third)] == ["a", 7, 3] and not first.error + second.error + third.error
    assert double.error == "line 4: the id 'a' was already used in line 1"
    assert taken.error == "line 5: the id 3 was already used in line 3"
    for odd in (b"true", b"1.5", b"null", b"[1]"):
        [record] = read_records(b'{"id": ' + odd + b"}\n")
        assert record.error.startswith("line 1: an id must be a string or an integer")


def test_invalid_lines_are_records_with_an_error():
    good, number, nan, broken = read_records(b'{"a": 1}\n5\n{"a": NaN}\n{"a"\n')
    assert good.error == "" and number.error == "line 2 is not a JSON object" and number.id == 2
    assert nan.error.startswith("line 3 is not JSON") and broken.error.startswith("line 4 is not JSON")
    plain = read_records(b"a\n\xff\n")
    assert plain[0] == Record(1, "a") and plain[1].error == "line 2 is not UTF-8 at byte 0"
    assert read_records("a\nü\n".encode("utf-16"))[1].input == "ü"
    assert [each.input for each in read_records(b'{"a": 1}\n', "x.ndjson")] == [{"a": 1}]


# ---- prompts


def asked(prompts: PromptBuilder, **fields: Any) -> Any:
    return prompts(Record(1, fields))


def user(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


def test_a_prompt_is_built_from_fields_messages_or_a_template():
    assert asked(PromptBuilder("Say {a} and {b}"), a="x", b=[1]) == user("Say x and [1]")
    assert PromptBuilder("Say {line}")(Record(1, "x")) == user("Say x") and PromptBuilder()(Record(1, "x")) == user("x")
    assert (
        asked(PromptBuilder(), prompt="p", line="l") == user("p") and asked(PromptBuilder(raw=True), prompt="p") == "p"
    )
    assert asked(PromptBuilder(system="s"), prompt="p") == [{"role": "system", "content": "s"}, *user("p")]
    assert asked(PromptBuilder(), messages=user("m"), prompt="p") == user("m")
    assert asked(PromptBuilder(system="s"), messages=user("m")) == [{"role": "system", "content": "s"}, *user("m")]
    assert asked(PromptBuilder(raw=True), messages=user("m"), prompt="p") == "p"
    assert asked(PromptBuilder(template="{{ a }}!"), a=1) == user("1!")


@pytest.mark.parametrize(("prompts", "fields", "message"), [
    ({"prompt": "{a}"}, {"b": 1}, "the record has no field 'a'"), ({}, {"x": 1}, 'has no field "messages" or "prompt"'),
    ({}, {"messages": "x"}, '"messages" must be a list'), ({}, {"messages": [], "image": "x"}, "in \"messages\""),
    ({"raw": True}, {"prompt": "x", "image": "i"}, "images cannot be combined with raw"),
    ({}, {"prompt": "x", "image": [""]}, "path of an image"),
])  # fmt: skip
def test_records_without_the_needed_fields_are_refused(prompts: dict[str, Any], fields: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        asked(PromptBuilder(**prompts), **fields)


def test_conflicting_prompt_options_are_refused():
    for options, message in (({"raw": True, "system": "s"}, "cannot be combined with raw"),
    ({"prompt": "{a}", "template": "x"}, "not both"),
                           ({"prompt": "hello"}, "must name a field"),
                           ({"template": "hello\n"}, "must name a field"),
                           ({"template": "{% if %}"}, "template is invalid")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            PromptBuilder(**options)
    with pytest.raises(UsageError, match="wrong line"):
        PromptBuilder()(Record(1, "x", "wrong line"))


@pytest.mark.parametrize(
    "options", [{"template": "{{ text }}!", "system": "s"}, {"prompt": "{text}?", "raw": True}, {"system": "s"}]
)
def test_prompts_can_be_pickled_for_another_process(options: dict[str, Any]):
    """Drop the compiled template."""
    record, prompts = Record(1, {"text": "a", "line": "b"}), PromptBuilder(**options)
    again = pickle.loads(pickle.dumps(prompts))
    if "text" in str(options):
        assert again(record) == prompts(record)
    assert repr(again) == repr(prompts)


@pytest.mark.parametrize("function", ["compile_template", "render_template"])
def test_out_of_memory_in_a_template_is_raised_as_such(monkeypatch: pytest.MonkeyPatch, function: str):
    def fails(*arguments: object, **named: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(sandbox, function, fails)
    with pytest.raises(MemoryError):
        PromptBuilder(template="{{ text }}")(Record(1, {"text": "a"}))


def test_images_of_a_record_are_sent_with_its_prompt():
    assert asked(PromptBuilder(), prompt="p", image="i") == user("p", images=["i"])
    assert asked(PromptBuilder("{a}"), a="x", image=["i", "j"]) == user("x", images=["i", "j"])
    assert asked(PromptBuilder("{image}"), image="i") == user("i")  # the text names it
    assert asked(PromptBuilder(template="{{ a }}"), a="x", image="i") == user("x", images=["i"])
    assert get_images({}) == get_images({"image": None}) == [] and get_images({"image": ["a"]}) == ["a"]
    for odd in (5, [5], "", [None]):
        with pytest.raises(UsageError, match='"image" must be the path of an image'):
            get_images({"image": odd})


# ---- texts and images to make vectors of


def test_the_text_or_image_of_a_record_is_read(tmp_path: Path):
    assert get_document(Record(1, "line"), "text") == "line" and get_document(Record(1, {"t": "x"}), "t") == "x"
    shown = get_document(Record(1, {"image": "i.png"}), "text")
    assert isinstance(shown, ShownImage) and shown.source == "i.png"
    assert get_document(Record(1, {"image": "i.png", "text": "x"}), "text") == "x"
    assert not is_image(Record(1, "line")) and not is_image(Record(1, {"image": 5}))
    for record, message in (
        (Record(1, {}), 'record 1 has no string in the field "text"'),
        (Record(1, {"text": 5}), "has no string in the field"),
        (Record(1, "x", "bad"), "bad"),
    ):
        with pytest.raises(UsageError, match=message):
            get_document(record, "text")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\x89PNG")
    keys = {get_cache_key(ShownImage(str(tmp_path / name))) for name in ("a", "b")}
    assert len(keys) == 1 and keys.pop().startswith("\0") and get_cache_key("text") == "text"


def test_files_below_folders_are_listed_without_hidden_ones(tmp_path: Path):
    for name in ("b/c.txt", "b/a.txt", "b/.hidden", "b/.git/x", "z.txt", ".own/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = list_files([f"{tmp_path}/z.txt", f"{tmp_path}/b", f"{tmp_path}/.own"])  # hidden ones only if they are named
    inside = [str(tmp_path / name) for name in ("b/a.txt", "b/c.txt", ".own/y.txt")]
    assert files == [f"{tmp_path}/z.txt", *inside]
    with pytest.raises(UsageError, match="none: no such file or folder"):
        list_files([f"{tmp_path}/none"])
    assert read_text_file(f"{tmp_path}/z.txt") == "z.txt"
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(UsageError, match="UTF-8"):
        read_text_file(f"{tmp_path}/latin")
    with pytest.raises(UsageError, match="cannot be read"):
        read_text_file(f"{tmp_path}/none")


def test_nearest_sorts_by_similarity_then_order():
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1]], np.float32)
    query = np.array([0, 1], np.float32)
    assert (
        find_nearest(query, vectors, 3) == [(1, 1.0), (3, 1.0), (2, pytest.approx(0.8))]
        and len(find_nearest(query, vectors, 9)) == 4
    )


@pytest.mark.parametrize(
    ("is_pair", "sees", "pooling", "expected"),
    [
        (False, False, "mean", ("Embedder", "file", "tokenizer of m", "engine", "mean")),
        (False, False, None, ("Embedder", "file", "tokenizer of m", "engine", None)),
        (True, True, None, ("PairEmbedder", "file", "engine")), (True, False, None, ("PairEmbedder", "file", "engine")),
        (True, True, "mean", "pooling cannot be set for a model of images and texts (CLIP): leave it out"),
        (False, True, None, "m.gguf: the model cannot embed images; use a CLIP model"),
    ],
)  # fmt: skip
def test_the_embedder_fits_the_model_and_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_pair: bool, sees: bool, pooling: Any, expected: Any
):
    """Close it after an error, too."""
    closed = []

    def maker(name: str) -> Any:
        def make(file: Any, *arguments: Any) -> Any:
            return SimpleNamespace(
                given=(name, "file" if file is opened else file, *arguments), close=lambda: closed.append(1)
            )

        return make

    opened: Any = SimpleNamespace(metadata="m", oddities=[])
    monkeypatch.setattr(embed.GGUFFile, "open", lambda path: {"m.gguf": opened}[path])
    monkeypatch.setattr(embed, "is_clip", lambda file: is_pair)
    monkeypatch.setattr(embed, "Tokenizer", SimpleNamespace(from_metadata="tokenizer of {}".format))
    monkeypatch.setattr(embed, "Embedder", maker("Embedder"))
    monkeypatch.setattr(pair_embedding, "ClipEmbedder", maker("PairEmbedder"))
    engine: Any = "engine"
    job = EmbedJob("m.gguf", EmbedOptions(), engine, pooling, sees)
    if isinstance(expected, str):
        with pytest.raises(UsageError) as failure, embed.open_embedder(job):
            pass
        assert str(failure.value) == expected and not closed
        return
    with pytest.raises(KeyboardInterrupt), embed.open_embedder(job) as embedder:
        assert embedder.given == expected and not closed
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
    """A function that embeds texts and records them."""

    def __init__(self) -> None:
        self.asked = list[list[str]]()

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.asked.append(texts)
        return np.array([[len(text), ord(text[0]), 1.5] for text in texts], np.float32)


def test_cached_embeddings_are_not_computed_again(job: EmbedJob):
    cache, make = VectorCache(job, 3), Maker()
    first = cache.embed(["aa", "b"], make)
    assert first.tolist() == [[2, 97, 1.5], [1, 98, 1.5]] and cache.found == 0
    assert cache.embed(["b", "ccc", "aa"], make).tolist() == [[1, 98, 1.5], [3, 99, 1.5], [2, 97, 1.5]]
    assert make.asked == [["aa", "b"], ["ccc"]] and cache.found == 2
    again = VectorCache(job, 3)
    assert again.embed(["ccc", "aa", "b"], make).tolist() == [[3, 99, 1.5], [2, 97, 1.5], [1, 98, 1.5]]
    assert len(make.asked) == 2 and again.found == 3
    double = VectorCache(job, 3)
    assert double.embed(["d", "d"], make).tolist() == [[1, 100, 1.5]] * 2
    assert (
        VectorCache(job, 3).embed(["d", "aa"], make).tolist() == [[1, 100, 1.5], [2, 97, 1.5]] and len(make.asked) == 3
    )


def test_an_unwritable_cache_is_ignored(job: EmbedJob, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localllm.services.search.embed.write_checksummed", full)
    cache, make = VectorCache(job, 3), Maker()
    assert cache.embed(["a"], make).tolist() == cache.embed(["a"], make).tolist() and len(make.asked) == 1


def test_each_model_and_option_has_its_own_cache(job: EmbedJob, tmp_path: Path):
    def other(**changes: Any) -> EmbedJob:
        fields = {"path": job.path, "options": job.options, "engine": job.engine, "pooling": None, **changes}
        return EmbedJob(**fields)

    fingerprints = [compute_fingerprint(each) for each in (
        job, other(options=EmbedOptions(dims=2)), other(options=EmbedOptions(normalize=False)),
        other(options=EmbedOptions(role="query")),
        other(options=EmbedOptions(overflow="cut")), other(pooling="mean"), other(engine=EngineOptions(context=64)),
    )]  # fmt: skip
    assert len(set(fingerprints)) == len(fingerprints) and compute_fingerprint(other()) == fingerprints[0]
    assert compute_fingerprint(other(engine=EngineOptions(threads=1))) == fingerprints[0]  # makes no difference
    data = bytearray(Path(job.path).read_bytes())
    for place in (0, 5, len(data) // 9, len(data) * 4 // 9 + 100, len(data) * 8 // 9 + 8000):
        changed = tmp_path / "changed.gguf"
        changed.write_bytes(bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :]))
        assert compute_fingerprint(other(path=str(changed))) != fingerprints[0], place
    changed.write_bytes(bytes(data) + b"x")
    assert compute_fingerprint(other(path=str(changed))) != fingerprints[0]
