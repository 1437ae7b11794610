"""Test embeddings and rerank scores, from Python and on the command line."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import model, write

import localllm
from localllm import api
from localllm.cli.commands import embed as embed_command
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import ContextError, ModelError, UnsupportedError, UsageError
from localllm.generation.embedding import embedder as embedding
from localllm.generation.embedding import reranker as reranking
from localllm.generation.embedding.clip_embedder import ClipEmbedder
from localllm.generation.embedding.embedder import (
    Embedder,
    EmbedOptions,
    average_chunks,
    find_prompt,
    normalize_vectors,
)
from localllm.generation.embedding.reranker import Reranker
from localllm.kernels.machine import get_lane
from localllm.services.records.lines import Record
from localllm.services.search import embed as embed_service
from localllm.services.search import embed as rerank_service
from localllm.services.warmup import compile_kernels
from localllm.system.files import get_cache_folder
from tests.unit.text.test_wordpiece import PIECES, WORDS, metadata


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return write_wordpiece_model("bert", tmp_path_factory.mktemp("embed") / "bert.gguf")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> Path:
    return write_wordpiece_model("bert_rank", tmp_path_factory.mktemp("rank") / "rank.gguf")


def write_wordpiece_model(name: str, path: Path) -> Path:
    """Write a tiny model with a WordPiece vocabulary."""
    tiny = model(name, vocab=len(PIECES), context=64)
    tiny.metadata.update(metadata())
    return write(tiny, path)


def run(*arguments, input: str = "") -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "localllm", *map(str, arguments)]
    return subprocess.run(words, input=input.encode(), capture_output=True, check=False)


def test_embed_in_python_honours_dims_pooling_and_normalize(bert):
    texts = [" ".join(WORDS[:5]), WORDS[9], ""]
    with localllm.open(bert, threads=1) as opened:
        vectors = opened.embed(texts)
        np.testing.assert_allclose((vectors**2).sum(axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(opened.embed(texts[:1])[0], vectors[0], atol=2e-3)
        assert opened.embed(texts, dims=7).shape == (3, 7)
        assert opened.embed(texts, pooling="cls").shape == vectors.shape
        assert abs((opened.embed(texts, normalize=False) ** 2).sum() - 3) > 0.1
        with pytest.raises(UnsupportedError, match="bert models make embeddings and cannot generate text"):
            list(opened.generate("Hi", max_tokens=1))
        with pytest.raises(ModelError, match=r"must have the tensor cls\.output\.weight .* computes embeddings"):
            opened.rerank("a", ["b"])
        for wrong in ({"dims": 0}, {"dims": 97}, {"role": "x"}, {"overflow": "x"}, {"pooling": "x"}):
            with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be"):
                opened.embed(texts, **wrong)


def test_long_texts_are_refused_cut_or_split(bert):
    text = " ".join(WORDS[:200])
    with localllm.open(bert, threads=1) as opened:
        with pytest.raises(ContextError, match=r"text 2 has .* tokens, the model's context is 64"):
            opened.embed(["a", text])
        cut, split = (opened.embed([text], overflow=how)[0] for how in ("cut", "split"))
        assert 0.5 < cut @ split < 0.9999


@pytest.mark.sampled
def test_rerank_scores_are_the_same_in_python_and_on_the_command_line(ranker):
    texts = [WORDS[3], " ".join(WORDS[3:9]), WORDS[70]]
    with localllm.open(ranker, threads=1) as opened:
        scores = opened.rerank(WORDS[3], texts)
        assert scores.shape == (3,)
        np.testing.assert_allclose(opened.rerank(WORDS[3], texts[1:2]), scores[1:2], atol=2e-2)
        with pytest.raises(ModelError, match="this model is a reranker"):
            opened.embed(texts)
        with pytest.raises(ContextError, match=r"text 1 has .* with its query"):
            opened.rerank("a", [" ".join(WORDS)])
        assert opened.rerank("a", [" ".join(WORDS)], cut=True).shape == (1,)
    lines = "".join(f"{text}\n" for text in texts)
    best = texts[int(scores.argmax())]
    assert run("rerank", ranker, "-q", WORDS[3], "--top", 1, input=lines).stdout.decode() == f"{best}\n"
    lines_of_json = run("rerank", ranker, "-q", WORDS[3], "--json", input=lines).stdout.decode().splitlines()
    assert [json.loads(line)["input"] for line in lines_of_json] == [texts[n] for n in np.argsort(-scores)]


def require_plausible_times(stderr: bytes, began: float) -> None:
    """Check that --stats reports no longer than the whole command took."""
    tokens, seconds = re.search(rb"(\d+) tokens in ([\d.]+) s, \d+ tokens/s", stderr).groups()
    assert int(tokens) > 0 and float(seconds) <= perf_counter() - began + 0.01


def test_embed_writes_json_lines_numpy_or_plain_text(bert, tmp_path):
    lines = f"{WORDS[1]} {WORDS[2]}\n{WORDS[5]}\n"
    began, done = perf_counter(), run("embed", bert, "--stats", input=lines)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    require_plausible_times(done.stderr, began)
    assert [one["id"] for one in records] == [1, 2]
    array = tmp_path / "v.npy"
    assert run("embed", bert, "-o", array, input=lines).returncode == 0
    np.testing.assert_allclose(np.load(array), [one["embedding"] for one in records], atol=1e-6)
    plain = run("embed", bert, "--format", "plain", "--dims", 3, input=lines).stdout.splitlines()
    assert [len(line.split()) for line in plain] == [3, 3]


def test_embed_continues_an_interrupted_output(bert, tmp_path):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text(f"{WORDS[1]}\n{WORDS[2]}\n")
    first = run("embed", bert, source, "-o", out)
    assert first.returncode == 0, first.stderr
    before = out.read_text().splitlines()
    source.write_text(f"{WORDS[1]}\n{WORDS[2]}\n{WORDS[3]}\n")
    assert run("embed", bert, source, "-o", out).returncode == 0
    assert out.read_text().splitlines()[:2] == before
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.sampled
def test_near_finds_the_nearest_file_and_caches_vectors(bert, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(0o700)
    (tmp_path / "cache" / "kernels").symlink_to(get_cache_folder() / "kernels")  # which need not be compiled again
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(" ".join(WORDS[number * 10 : number * 10 + 6]))
    wanted = f"2.txt\n{(folder / '2.txt').read_text()}"  # what the vector of its passage is made of
    for known in (0, 4):
        began = perf_counter()
        done = run("embed", bert, "--files", folder, "--near", wanted, "--top", 2, "--stats")
        best, *_ = done.stdout.decode().splitlines()
        cosine, place, text = best.split("\t")
        assert place == f"{folder / '2.txt'}:1" and float(cosine) > 0.999 and text == (folder / "2.txt").read_text()
        assert f"{known} of 4 vectors were cached" in done.stderr.decode()
        require_plausible_times(done.stderr, began)


def test_embed_finds_passages_of_files_and_skips_binary_ones(bert, tmp_path):
    """Read long files and other encodings; --files takes any number of files and folders."""
    good, other, folder = tmp_path / "good.txt", tmp_path / "other.txt", tmp_path / "notes"
    folder.mkdir()
    good.write_text(f"{WORDS[1]} {WORDS[2]}")
    other.write_text(WORDS[9])
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "picture.bin").write_bytes(b"a\0b")
    (folder / "long.txt").write_text("\n\n".join(" ".join(WORDS[:40]) for _ in range(3)))
    (folder / "short.txt").write_text(WORDS[4])
    for _ in range(2):  # the second time vectors come from the cache, and the notes are the same
        asked = f"good.txt\n{good.read_text()}"
        done = run("embed", bert, "--near", asked, "--top", 9, "--files", good, folder, other)
        assert done.returncode == 0, done.stderr.decode()
        places = [line.split("\t")[1] for line in done.stdout.decode().splitlines()]
        whole = [f"{path}:1" for path in (good, other, folder / "short.txt", folder / "latin.txt")]
        long = [f"{folder / 'long.txt'}:{line}" for line in (1, 3, 5)]
        assert places[0] == whole[0] and sorted(places) == sorted([*whole, *long])
        assert (
            done.stderr.decode()
            == f"localllm: skipped: {folder / 'picture.bin'} must be a text file, but is binary: leave it out\n"
        )
    done = run("embed", bert, "--files", other, folder / "long.txt", good)
    by_id = {one["id"]: one for one in map(json.loads, done.stdout.splitlines())}
    first, second, third = (by_id[str(path)] for path in (other, folder / "long.txt", good))
    assert done.returncode == 6 and "embedding" in first and "embedding" in third
    assert second["error"].startswith(f"{folder / 'long.txt'} has ")
    assert b"unexpected argument" in run("embed", bert, good, other).stderr


@pytest.mark.slow
def test_embed_and_rerank_refuse_unsuitable_models_and_options(bert, ranker, model_path, tmp_path):
    cases = [
        (("embed", model_path("llama")), "a\n", 3, "use --pooling last"),
        (("embed", ranker), "a\n", 3, "use localllm rerank"),
        (("rerank", bert, "-q", "a"), "a\n", 3, "(localllm embed)"),
        (("rerank", bert), "a\n", 2, "--query TEXT is missing"),
        (("embed", bert), " ".join(WORDS), 4, "the model's context is 64"),
        (("embed", bert, "--files", tmp_path / "none"), "", 2, "no such file or folder"),
        (("embed", bert, "--near", "a", "-o", tmp_path / "x"), "", 2, "--near prints texts"),
        (("run", bert, "-p", "Hi"), "", 3, "cannot generate text"),
    ]
    for arguments, stdin, code, message in cases:
        done = run(*arguments, input=stdin)
        assert (done.returncode, message in done.stderr.decode()) == (code, True), done.stderr.decode()
        assert not done.stdout


@pytest.mark.sampled
@pytest.mark.slow
def test_fit_and_inspect_describe_embedding_models(bert, ranker):
    facts = json.loads(run("fit", bert, "--json").stdout)
    assert [(row["context"], row["tokens_per_s"], row["fits"]) for row in facts["rows"]] == [(64, None, True)]
    assert b"It fits, with texts of up to 64 tokens" in run("fit", bert).stdout
    for path, what in ((bert, "vectors by the mean of all tokens"), (ranker, "scores")):
        assert f"makes         {what}\n" in run("inspect", path).stdout.decode()
        assert json.loads(run("inspect", path, "--json").stdout)["reads"] == what


def test_split_texts_are_averaged_by_their_lengths():
    rows = np.array([[1, 0], [0, 2], [4, 4]], np.float32)
    averages = average_chunks(rows, [[0] * 3, [0], [0]], [0, 0, 1])
    np.testing.assert_allclose(averages, [[0.75, 0.5], [4, 4]])
    np.testing.assert_allclose(normalize_vectors(np.array([[3, 4], [0, 0]], np.float32)), [[0.6, 0.8], [0, 0]])


@pytest.mark.parametrize(("text", "overflow", "expected"), [
    ("abcd", "refuse", ["<abcd>"]), ("", "refuse", ["<>"]), ("abcde", "cut", ["<abcd>"]),
    ("abcde", "split", ["<abcd>", "<e>"]), ("abcdefgh", "split", ["<abcd>", "<efgh>"]),
    ("abcde", "refuse", "text 3 has 7 tokens, the model's context is 6: shorten it or set overflow to cut or split"),
])  # fmt: skip
def test_a_text_becomes_segments_that_fit_the_context(text: str, overflow: str, expected: list[str] | str):
    embedder = Embedder.__new__(Embedder)
    embedder.context, embedder._before, embedder._behind, embedder._tokenizer = (
        6,
        ["<"],
        [">"],
        SimpleNamespace(encode=list),
    )
    options = EmbedOptions(overflow=overflow)
    with pytest.raises(ContextError, match=f"^{expected}$") if isinstance(expected, str) else nullcontext():
        assert ["".join(piece) for piece in embedder.tokenize(text, options, "text 3")] == expected
    for embedder.context in (3, 2):
        short = "^a context of 2 tokens is too short for any text$"
        with nullcontext() if embedder.context == 3 else pytest.raises(UsageError, match=short):
            assert embedder.tokenize("ab", EmbedOptions(overflow="cut"), "text 1") == [["<", "a", ">"]]
    embedder._before = embedder._behind = []
    with pytest.raises(UsageError, match=r"^text 3 is empty, and the model adds no tokens to it$"):
        embedder.tokenize("", options, "text 3")


def test_embed_averages_segments_cuts_dims_and_counts_tokens():
    embedder, heard = Embedder.__new__(Embedder), []
    embedder.context, embedder._before, embedder._behind, embedder._tokenizer = (
        6,
        ["<"],
        [">"],
        SimpleNamespace(encode=list),
    )
    embedder.width, embedder.tokens, embedder.path, embedder._metadata = 3, 5, "x", {"localllm.prompt.query": "q"}
    embedder.reader = SimpleNamespace(read=lambda pieces, progress: heard.append((pieces, progress)) or np.tile(
        np.array([[3, 4, 12]], np.float32), (len(pieces), 1)))  # fmt: skip
    np.testing.assert_allclose(embedder.embed(["ab", "c"], progress=print), [[3 / 13, 4 / 13, 12 / 13]] * 2, rtol=1e-6)
    assert (heard, embedder.tokens) == ([([[*"<ab>"], [*"<c>"]], print)], 12)
    assert embedder.embed(["a"], EmbedOptions(dims=1)).tolist() == [[1]] and heard.pop() and embedder.tokens == 15
    np.testing.assert_allclose(embedder.embed(["a"], EmbedOptions(dims=2, role="query")), [[0.6, 0.8]], rtol=1e-6)
    assert heard[1] == ([[*"<qa>"]], None)
    raw = embedder.embed(["abcdef", "g"], EmbedOptions(dims=3, normalize=False, overflow="split"))
    assert raw.tolist() == [[3, 4, 12]] * 2 and heard[2][0] == [[*"<abcd>"], [*"<ef>"], [*"<g>"]]
    for options, problem in (
        (EmbedOptions(dims=4), "dims must be 3 or below, not 4: that is the vectors' width"),
        (EmbedOptions(dims=0), "dims must be 1 or greater, not 0"),
        (EmbedOptions(role="x"), "role must be query or document, not 'x'"),
        (EmbedOptions(overflow="x"), "overflow must be refuse, cut or split, not 'x'"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            embedder.embed(["a"], options)
    with pytest.raises(ContextError, match="text 2 has 7 tokens"):
        embedder.embed(["a", "abcde"])
    assert EmbedOptions() == EmbedOptions(None, True, None, "refuse")


@pytest.mark.parametrize(
    ("bos", "eos", "warnings"), [("<", ">", ["a", "b"]), ("", ">", ["b"]), ("<", "", []), ("", "", ["a"])]
)
def test_begin_and_end_tokens_surround_each_text(bos: str, eos: str, warnings: list[str], monkeypatch):
    reader = SimpleNamespace(width=3, context=9, warning="b" if "b" in warnings else None)
    monkeypatch.setattr("localllm.engine.embedding_runner.EmbeddingRunner", lambda file, pooling, options: reader)
    monkeypatch.setattr(embedding, "select_pooling", lambda file, pooling: pooling)
    tokenizer = SimpleNamespace(warnings=["a"] if "a" in warnings else [])
    tokenizer.encode = lambda text, bos=False, eos=False: [*"<" * (bos and begins), *text, *">" * (eos and ends)]
    begins, ends = len(bos), len(eos)
    embedder = Embedder(SimpleNamespace(path="x", metadata={}), tokenizer, None, "mean")
    assert (embedder.pooling, embedder.width, embedder.context, embedder.tokens, embedder.warnings) == (
        "mean",
        3,
        9,
        0,
        warnings,
    )
    assert embedder.tokenize("ab", EmbedOptions(), "text 1") == [[*bos, *"ab", *eos]]


NOTHING_SAID = "/m.gguf: the model does not define how to pool token vectors: it is not an embedding model"


@pytest.mark.parametrize(("wanted", "declared", "head", "lookahead", "expected"), [
    (None, "mean", False, False, "mean"), (None, "last", True, False, "last"), (None, None, False, True, "cls"),
    (None, "mean", True, True, "cls"), ("last", "rank", True, True, "last"), ("mean", None, False, False, "mean"),
    ("last", None, True, False, "last"),
    ("none", "mean", False, False, "pooling must be mean, cls or last, not 'none'"),
    ("rank", "mean", False, False, "pooling must be mean, cls or last, not 'rank'"),
    (None, None, False, False, NOTHING_SAID), (None, "none", False, False, NOTHING_SAID),
    (None, "rank", False, True, "/m.gguf: this model is a reranker"),
    (None, None, True, True, "/m.gguf: this model is a reranker"),
])  # fmt: skip
def test_pooling_comes_from_the_option_then_the_file(
    wanted, declared, head: bool, lookahead: bool, expected: str, monkeypatch
):
    read = SimpleNamespace(pooling="cls", bidirectional=lookahead)
    monkeypatch.setattr(embedding, "load_architecture", lambda file: (None, read))
    monkeypatch.setattr(embedding, "HyperparameterReader", SimpleNamespace(from_file=lambda file: file))
    monkeypatch.setattr(embedding, "read_pooling", lambda fields: declared)
    for name in ("cls.weight", "cls.output.weight"):
        file = SimpleNamespace(path="/m.gguf", tensors={name: 1} if head else {"cls.bias": 1})
        with nullcontext() if " " not in expected else pytest.raises((ModelError, UsageError), match=expected):
            assert embedding.select_pooling(file, wanted) == expected


def test_prompts_for_roles_come_from_metadata_or_the_models_name():
    assert find_prompt({"general.name": "Nomic Embed Text v1.5"}, "query", "x") == "search_query: "
    assert find_prompt({"localllm.prompt.query": "Q: "}, "query", "x") == "Q: "
    assert find_prompt({"localllm.prompt.query": "Q: "}, "document", "x") == ""
    assert find_prompt({"localllm.prompt.document": "", "general.name": "nomic"}, "document", "x") == ""
    search, instruct = (
        "Represent this sentence for searching relevant passages: ",
        "Instruct: Given a web search query, ",
    )
    for name, query, document in (
        ("multilingual_E5_large", "query: ", "passage: "), ("bge-small-en-v1.5", search, ""), ("BGE M3", "", ""),
        ("snowflake-arctic-embed-l-v2.0", "query: ", ""), ("snowflake-arctic-embed-m", search, ""), ("gte", "", ""),
        ("embeddinggemma-300M", "task: search result | query: ", "title: none | text: "), ("all-MiniLM-L6", "", ""),
        ("Qwen3_Embedding 0.6B", instruct + "retrieve relevant passages that answer the query\nQuery:", ""),
    ):  # fmt: skip
        for key in ("general.name", "general.basename"):
            assert [find_prompt({key: name}, role, "x") for role in ("query", "document")] == [query, document]
    with pytest.raises(UsageError, match=r"^m.gguf: the model has no prompt for a document; add one"):
        find_prompt({"general.name": 5, "general.basename": "we5"}, "document", "m.gguf")
    with pytest.raises(UsageError, match="has no prompt for a query"):
        find_prompt({"general.name": "Something"}, "query", "x")


@pytest.mark.parametrize("kind", [Embedder, ClipEmbedder, Reranker])
def test_closing_an_embedder_closes_its_reader(kind):
    embedder, ended = kind.__new__(kind), []
    embedder.reader = SimpleNamespace(close=lambda: ended.append(True))
    embedder.close()
    assert ended


class Letters:
    """A tokenizer whose tokens are letters; special ones are marked.

    Attributes:
        bos_id, eos_id: tokens, or None.
        marks_pairs: whether the second text of a pair has its own segment id.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, bos_id: str | None = "[", eos_id: str | None = "]", marks_pairs: bool = False):
        self.bos_id, self.eos_id, self.marks_pairs = bos_id, eos_id, marks_pairs

    def encode(self, text: str, special: bool = False) -> list[str]:
        return [letter + "!" * special for letter in text]


def reranker_of(
    monkeypatch, tokenizer: Letters, decodes: bool = False, labels: object = None, context: int = 40
) -> Reranker:
    """Return a reranker whose reader scores by lengths and records its calls in `heard`."""
    reader = SimpleNamespace(context=context, warning="careful", heard=[])
    reader.hyperparameters = SimpleNamespace(arch="x", bidirectional=not decodes)
    reader.read = lambda *call: reader.heard.append(call) or np.array([[len(ids)] for ids in call[0]], np.float32)
    monkeypatch.setattr("localllm.engine.embedding_runner.EmbeddingRunner", lambda file, pooling, options: reader)
    monkeypatch.setattr(reranking, "require_reranker", lambda file: None)
    monkeypatch.setattr(reranking, "has_head", lambda file: True)
    metadata = {} if labels is None else {"x.classifier.output_labels": labels}
    return Reranker(SimpleNamespace(path="/r.gguf", metadata=metadata), tokenizer, None)


ASKED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: why?\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def test_a_decoder_reranks_with_the_prompt_of_its_model_card(monkeypatch):
    """Keep control tokens out of the user's text."""
    ranker = reranker_of(monkeypatch, Letters(), decodes=True, context=10_000)
    assert list(ranker.rerank("why?", ["so", "<|im_end|>"])) == [len(ids) for ids in ranker.reader.heard[0][0]]
    for ids, text in zip(ranker.reader.heard[0][0], ("so", "<|im_end|>"), strict=True):
        assert ids == [*(f"{letter}!" for letter in ASKED[0]), *ASKED[1], *text, *(f"{letter}!" for letter in ASKED[2])]
    assert ranker.reader.heard[0][1:] == (None, None) and ranker.tokens == sum(map(len, ranker.reader.heard[0][0]))
    ranker.reader.context = ranker.context = (around := len("".join(ASKED))) + 16
    assert len(ranker.rerank("why?", ["x" * 16])) == 1 and ranker.reader.heard[-1][0][0][-len(ASKED[2]) - 1] == "x"
    message = (
        f"text 1 has {around + 17} tokens with its query, the model's context is {around + 16}: shorten it or set cut"
    )
    with pytest.raises(ContextError, match=message):
        ranker.rerank("why?", ["x" * 17])
    ranker.rerank("why?", ["x" * 17], cut=True)
    assert len(ranker.reader.heard[-1][0][0]) == around + 16
    with pytest.raises(UsageError, match=rf"the query has {around + 1} tokens with its special tokens; the model"):
        ranker.rerank("why?!", ["x"], cut=True)


@pytest.mark.parametrize(
    ("tokenizer", "pair", "seconds"),
    [
        (Letters(marks_pairs=True), "[why]text]", [5]), (Letters(), "[why]]text]", None),
        (Letters(bos_id=None), "why]]text]", None), (Letters(eos_id=None), "[whytext", None),
    ],
)  # fmt: skip
def test_a_pair_is_joined_with_the_vocabularys_separators(
    monkeypatch, tokenizer: Letters, pair: str, seconds: list[int] | None
):
    """Put one end between the texts for WordPiece, two for others."""
    ranker = reranker_of(monkeypatch, tokenizer)
    assert list(ranker.rerank("why", ["text"], progress=print)) == [len(pair)]
    assert ["".join(ids) for ids in ranker.reader.heard[0][0]] == [pair]
    assert ranker.reader.heard[0][1:] == (seconds, print)
    around = len(pair) - 4
    ranker.rerank("why", ["x" * (40 - around)])
    with pytest.raises(ContextError, match="text 2 has 41 tokens with its query, the model's context is 40"):
        ranker.rerank("why", ["x", "x" * (41 - around)])
    assert ranker.tokens == len(pair) + 40 and len(ranker.reader.heard) == 2
    ranker.rerank("w" * (24 - around + 3), ["x" * 50], cut=True)  # 16 tokens of a text are left
    assert len(ranker.reader.heard[-1][0][0]) == 40
    with pytest.raises(UsageError, match="the query has 25 tokens with its special tokens; the model's context is 40"):
        ranker.rerank("w" * (25 - around + 3), ["x"])
    short = reranker_of(monkeypatch, tokenizer, context=20)
    short.rerank("w" * (10 - around + 3), ["x" * 10])
    with pytest.raises(UsageError, match="the query has 11 tokens"):  # half of what is read
        short.rerank("w" * (11 - around + 3), ["x"])


def test_the_score_is_the_output_labelled_yes(monkeypatch):
    rows = np.array([[1, 3], [90, -90], [-90, 90], [2, 2]], np.float32)
    yes_first, no_first = (
        reranker_of(monkeypatch, Letters(), labels=labels) for labels in (["yes", "no"], ["no", "yes"])
    )
    likely = [1 / (1 + np.exp(2)), 1, 0, 0.5]
    np.testing.assert_allclose(yes_first._select_relevance(rows), likely, atol=1e-6)
    np.testing.assert_allclose(no_first._select_relevance(rows), 1 - np.array(likely), atol=1e-6)
    assert yes_first._select_relevance(rows).dtype == np.float32 and yes_first.warnings == ["careful"]
    assert list(reranker_of(monkeypatch, Letters())._select_relevance(rows[:, 1:])) == [3, -90, 90, 2]
    for labels, columns in ((None, 2), ("yes no", 2), (["yes", "maybe"], 2), (["yes", "no", "maybe"], 3)):
        ranker = reranker_of(monkeypatch, Letters(), labels=labels)
        assert ranker.labels == (labels if isinstance(labels, list) else [])
        with pytest.raises(ModelError, match=f"^/r.gguf: the head has {columns} classes, none of which is relevance; "):
            ranker._select_relevance(np.ones((2, columns), np.float32))


def test_a_reranker_is_closed_even_after_an_error(monkeypatch):
    events: list[object] = []
    file = SimpleNamespace(metadata={"a": 1}, oddities=[])
    monkeypatch.setattr(rerank_service, "GGUFFile", SimpleNamespace(open=lambda path: events.append(path) or file))
    monkeypatch.setattr(rerank_service, "Tokenizer", SimpleNamespace(from_metadata=lambda metadata, _: [metadata]))
    reranker = SimpleNamespace(close=lambda: events.append("closed"))
    monkeypatch.setattr(rerank_service, "Reranker", lambda *arguments: events.append(arguments) or reranker)
    with pytest.raises(KeyError), rerank_service.open_reranker("x.gguf", "options") as opened:
        assert opened is reranker and events == ["x.gguf", (file, [{"a": 1}], "options")]
        raise KeyError
    assert events[2:] == ["closed"]


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_failed_text_is_reported_only_if_it_was_read_alone(monkeypatch, chunk: int):
    """Raise otherwise, since the failed text is unknown."""
    failed, written = [], []

    def embed(texts: list[str], options: object, on_progress: object) -> list[str]:
        if "bad" in texts:
            raise UsageError("it went away")
        return texts

    embedder = SimpleNamespace(chunk=chunk, tokenize=lambda *texts: None, embed=embed)
    out = SimpleNamespace(
        find_remaining=lambda records: records,
        fail=lambda record, error: failed.append((record.id, str(error))),
        put=lambda records, rows: written.extend(rows),
    )
    monkeypatch.setattr(embed_service, "open_embedder", lambda job: nullcontext(embedder))
    monkeypatch.setattr(embed_command, "open_with_warnings", lambda embedder, line: embedder)
    monkeypatch.setattr(embed_command, "open_output", lambda *texts: nullcontext(out))
    job = SimpleNamespace(path="x", options=SimpleNamespace(overflow="error"))
    records = [Record(number, text) for number, text in enumerate(["good", "bad", "fine"])]
    call = lambda: embed_command.write_vectors(job, records, "text", None, "jsonl", False, ProgressLine())  # noqa: E731
    if chunk == 1:
        assert call() == (1, embedder)
        assert (failed, written) == ([(1, "it went away")], ["good", "fine"])
    else:
        with pytest.raises(UsageError, match="it went away"):
            call()
        assert not failed and not written


@pytest.mark.parametrize(("fills", "lookahead"), [(False, False), (False, True), (True, True)])
def test_logits_read_a_diffusion_model_whole_and_others_in_a_sequence(monkeypatch, fills: bool, lookahead: bool):
    heard: list[Any] = []
    sequence = SimpleNamespace(
        append=lambda *call, kernel_tokens: heard.append(call) or "rows", close=lambda: heard.append("closed")
    )
    h = SimpleNamespace(is_diffusion=fills, bidirectional=lookahead, pooling="mean")
    engine = SimpleNamespace(
        hyperparameters=h, forward_full=lambda ids: ("whole", ids), prepare_all=lambda: heard.append("all")
    )
    model: Any = SimpleNamespace(engine=engine, sequence=lambda: sequence, file="file")
    logits = api.Model.logits(model, np.array([1, 2]))
    assert (logits, heard) == ((("whole", [1, 2]), []) if fills else ("rows", [([1, 2], "all"), "closed"]))
    heard.clear()

    class Reader:
        def __init__(self, file: Any, pooling: str, options: Any):
            heard.append((file, pooling, options.progress))

        prepare_all = staticmethod(lambda: heard.append("reader"))
        close = staticmethod(lambda: heard.append("ended"))

    monkeypatch.setattr(api, "open_model", lambda path, progress: nullcontext(model))
    monkeypatch.setattr("localllm.engine.embedding_runner.EmbeddingRunner", Reader)
    compile_kernels("m", print)
    assert heard == ["all", *[("file", "mean", print), "reader", "ended"] * (lookahead and not fills)]


@pytest.mark.skipif(get_lane().has_avx2_only, reason="with AVX2 only, one token is added in another order")
def test_quantized_models_embed_a_text_the_same_alone_and_in_a_batch(tmp_path):
    """Select kernels and activation precision by the text alone."""
    tiny = model("bert", vocab=len(PIECES), context=256)
    tiny.metadata.update(metadata())
    path, small = write(tiny, tmp_path / "f32.gguf"), tmp_path / "q8_0.gguf"
    done = run("quantize", path, small, "Q8_0")
    assert done.returncode == 0, done.stderr
    texts = [
        " ".join((WORDS * 20)[number : number + length])
        for number, length in enumerate((1, 9, 20, 31, 45, 62, 100, 140))
    ]
    with localllm.open(small, threads=1) as opened:
        together = opened.embed(texts * 3)
        for number, text in enumerate(texts):
            for place in range(number, len(together), len(texts)):
                np.testing.assert_array_equal(together[place], opened.embed(text))


def test_near_duplicates_form_groups():
    angles = np.radians([0, 3, 90, 6, 92, 200, 9])
    vectors = np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    groups = embed_service.group_similar(vectors, float(np.cos(np.radians(3.1))))
    assert groups == [[0, 1, 3, 6], [2, 4]] and embed_service.group_similar(vectors[:0], 0.5) == []


def test_embed_duplicates_prints_groups_and_checks_its_range(bert, cli):
    lines = f"{WORDS[0]}\n{WORDS[1]} {WORDS[2]}\n{WORDS[0]}\n".encode()
    code, out, _ = cli("embed", bert, "--duplicates", 0.9999, stdin=lines)
    assert (code, out) == (0, f"1.0000\t{WORDS[0]}\n1.0000\t{WORDS[0]}\n")
    code, _, err = cli("embed", bert, "--duplicates", 2, stdin=lines)
    assert code == 2 and "--duplicates must be above 0 and up to 1, not 2" in err
    code, _, err = cli("embed", bert, "--duplicates", 0.9, "--near", "x", stdin=lines)
    assert code == 2 and "--duplicates prints texts, not vectors" in err
