"""Test all that commands print, with stand-ins that compute known figures."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from invoked import Opened, Told, invoke
from tiny_model import write_tiny_model

from localllm.cli import open_model as opening
from localllm.cli import open_model as pulling
from localllm.cli.commands import chat, rm, serve, tokenize
from localllm.cli.commands import list as list_command
from localllm.cli.interactive import conversation as chat_session
from localllm.cli.options import one_shot as tool_options
from localllm.cli.options import shared as shape
from localllm.cli.options.shared import AdapterFlags, CacheFlags, EngineFlags, RopeFlags
from localllm.cli.terminal import render
from localllm.cli.terminal.line_editor import PlainLineEditor
from localllm.errors import LocalllmError, ModelError, RecordsError, UsageError
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations, read_imatrix
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.embedding.embedder import EmbedOptions
from localllm.generation.options import GenerationOptions
from localllm.quantizing import imatrix as imatrix_service
from localllm.services import bench as bench_service
from localllm.services import sessions
from localllm.services.bench import BenchResult, SpeedTestSpec
from localllm.services.evaluation import perplexity as perplexity_service
from localllm.services.evaluation.scores import Comparison, Prediction
from localllm.services.hub.catalogue import HubReference, MissingError
from localllm.services.inspection.inspect import MatrixCosts
from localllm.services.search import embed as embed_service
from localllm.services.search import embed as rerank_service
from localllm.services.tools import confined

SpeedTestSpec.__test__ = False  # no test case

# ---- scores


class Ranker:
    """A reranker that scores texts by their lengths."""

    warnings, tokens = ("it is small",), 12

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def rerank(self, query: str, texts: list[str], cut: bool, progress: Any) -> np.ndarray:
        self.asked.append((query, texts, cut))
        progress(len(texts))
        return np.array([len(text) / 4 for text in texts], np.float32)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", "cäc\nbb\na\n"), ("--top 2", "cäc\nbb\n"), ("--scores --top 2", "0.750000\tcäc\n0.500000\tbb\n"),
        ("--json --top 1", '{"id": 2, "score": 0.75, "input": "cäc"}\n'),
    ],
)  # fmt: skip
def test_rerank_prints_scores_and_passes_its_options(line: str, shown: str, tiny: str, monkeypatch, capsys):
    ranker, engines = Ranker(), []
    monkeypatch.setattr(
        rerank_service, "open_reranker", lambda *arguments: engines.append(arguments) or nullcontext(ranker)
    )
    words = ["-q", "x", "-c", "77", "-t", "3", "--device", "cpu", *line.split()]
    invoke("rerank", tiny, *words, stdin="a\ncäc\nbb\n".encode())
    out, err = capsys.readouterr()
    assert (out, err) == (shown, "localllm: warning: it is small\n")
    assert ranker.asked == [("x", ["a", "cäc", "bb"], False)]
    [(path, engine)] = engines
    assert (path, engine.context, engine.threads, engine.backend) == (tiny, 77, 3, "cpu")


def test_rerank_reads_a_field_of_json_lines(tiny: str, monkeypatch, capsys):
    ranker = Ranker()
    monkeypatch.setattr(rerank_service, "open_reranker", lambda *arguments: nullcontext(ranker))
    lines = '{"t": "ä", "id": "x"}\n{"t": "bbb"}\n'.encode()
    invoke("rerank", tiny, "-q", "x", "--field", "t", "--overflow", "cut", "--stats", stdin=lines)
    out, err = capsys.readouterr()
    assert out == '{"t": "bbb"}\n{"t": "ä", "id": "x"}\n' and ranker.asked == [("x", ["ä", "bbb"], True)]
    assert err.splitlines()[1].startswith("12 tokens in 0.0")
    with pytest.raises(UsageError, match="--query TEXT is missing"):
        invoke("rerank", tiny)


# ---- measuring

COSTS = MatrixCosts(weight_bytes=2_000_000, per_token=3_000_000, per_logits=1_000_000)
MODEL = {"path": "/m/my|model.gguf", "arch": "llama", "format": "Q8_0", "device": "CPU", "size": 2 * 10**6,
         "parameters": 10**6}  # fmt: skip


class Bench:
    """A benchmark with known results: one test of prefill and one of decode."""

    lane, heard = "avx2", list[Any]()

    def __init__(self, path: str, on_step: Any, on_compile: Any):
        self.model = MODEL
        self.heard[:] = [path]

    def run(self, *arguments: Any) -> Iterator[BenchResult]:
        self.heard.append(arguments)
        yield BenchResult(SpeedTestSpec(10, 0), 2, [500.0, 700.0], COSTS)
        yield BenchResult(SpeedTestSpec(0, 4), 2, [1000.0], COSTS, bandwidth=8e9)

    def report(self, results: list[BenchResult]) -> Told:
        return {"tests": len(results), "model": "mäße"}


ROWS = """\
| model | test | threads | tokens/s | arithmetic, avx2 | weights read |
| --- | --- | --: | --: | --: | --: |
| my\\|model | pp10 | 2 | 600.00 ± 141.42 | 4 GOPS |  |
| my\\|model | tg4 | 2 | 1000.00 ± 0.00 |  | 2.0 of 8.0 GB/s, 25% |
"""


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", ([(512, 0), (0, 128)], None, 5, "f16", "auto", "auto")),
        ("-p 1,2 -n 0 -r 3 -t 1,2 --kv-type q8_0 --device cpu -ngl 4", ([(1, 0), (2, 0)], (1, 2), 3, "q8_0", "cpu", 4)),
        ("-p 0 -n 3 -pg 5,6 -ctk f32", ([(0, 3), (5, 6)], None, 5, "k=f32,v=f16", "auto", "auto")),
    ],
)  # fmt: skip
def test_bench_prints_a_table_or_json(line: str, arguments: tuple, tiny: str, monkeypatch, capsys):
    monkeypatch.setattr(bench_service, "Bench", Bench)
    invoke("bench", tiny, *line.split())
    assert capsys.readouterr() == (ROWS, "")
    path, (tests, *others) = Bench.heard
    assert (path, [(test.prompt, test.generated) for test in tests], *others) == (tiny, *arguments, None, None)
    invoke("bench", tiny, "-d", "7", "--json")
    assert capsys.readouterr().out == '{"tests": 2, "model": "mäße"}\n'
    assert [test.depth for test in Bench.heard[1][0]] == [7, 7]


TEXTS = [{"length": 16, "tokens_per_second": 1234.5, "deviation": 2.5, "texts_per_second": 77.16},
         {"length": 64, "tokens_per_second": 999.4, "deviation": 0.0, "texts_per_second": 15.6}]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", ((16, 64, 512), None, 5, "auto")), ("-p 512", ((16, 64, 512), None, 5, "auto")),
        ("-p 8,9 -t 3,4 -r 2 --device cpu", ((8, 9), 3, 2, "cpu")),
    ],
)  # fmt: skip
def test_bench_of_an_embedding_model_prints_speeds_by_length(
    line: str, arguments: tuple, tiny: str, monkeypatch, capsys
):
    heard: list[Any] = []

    def measured(path, lengths, threads, repetitions, report, progress, device):
        report("one")
        heard.append((lengths, threads, repetitions, device))
        return TEXTS

    monkeypatch.setattr(bench_service, "measure_embedding", measured)
    monkeypatch.setattr(bench_service, "is_embedding_only", lambda path: True)
    invoke("bench", tiny, *line.split())
    assert heard == [arguments]
    assert capsys.readouterr() == (
        "texts of   tokens/s  texts/s\n16 tokens  1234 ± 2     77.2\n64 tokens   999 ± 0     15.6\n", "",
    )  # fmt: skip
    invoke("bench", tiny, "--json")
    assert json.loads(capsys.readouterr().out) == {"model": tiny, "results": TEXTS}


class Reads:
    """A chunk reader with known predictions."""

    path, warnings, total, done = "/ä.gguf", ["it is small"], 3, 1
    tokenizer = SimpleNamespace(encode=lambda text, bos: [*range(1000)] if bos else [])

    def __init__(self, heard: list[Any], made_with: str | None = None):
        self.heard, self.made_with = heard, made_with

    def __enter__(self) -> "Reads":
        return self

    def __exit__(self, *error: object) -> None:
        self.heard.append("closed")

    def predict(self, chunks: np.ndarray, save: str | None) -> Iterator[Prediction]:
        self.heard.append((chunks.shape, save))
        for count in (1, 2):
            yield Prediction(count, np.full(8 * count, 1.5))

    def compare(self, logits: Any, most: int | None) -> Iterator[Comparison]:
        self.heard.append(most)
        nll, kld = np.array([1.0, 2.0]), np.array([0.25, 0.75])
        yield Comparison(1, nll, nll - 0.5, kld, np.array([0.125, -0.125]), np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("line", "read", "chunks"),
    [
        ("", (512, None, "f16"), (1, 512)),
        ("-c 100 -t 3 --chunks 4 -ctv q8_0 --save-logits OUT", (100, 3, "k=f16,v=q8_0"), (4, 100)),
    ],
)
def test_perplexity_prints_its_result_and_warnings(
    line: str, read: tuple, chunks: tuple, tiny: str, monkeypatch, capsys, tmp_path
):
    heard: list[Any] = []

    def reader(path, size, threads, progress, kv_type, _):
        heard.append((path, size, threads, kv_type))
        return Reads(heard)

    monkeypatch.setattr(perplexity_service, "PerplexityRunner", reader)
    (tmp_path / "text").write_text("text")
    words = line.replace("OUT", str(tmp_path / "out")).split()
    saved = str(tmp_path / "out") if "OUT" in line else None
    invoke("perplexity", tiny, tmp_path / "text", *words)
    size = read[0]
    out, err = capsys.readouterr()
    assert out == f"PPL = 4.4817 ± 0.0000 (2 chunks of {size} tokens)\n"
    assert err == "localllm: warning: it is small\n"
    assert heard == [(tiny, *read), (chunks, saved), "closed"]
    invoke("perplexity", tiny, tmp_path / "text", "--json", *words)
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert '"model": "/ä.gguf"' in out and result.pop("perplexity") == pytest.approx(np.exp(1.5))
    assert result == {"model": "/ä.gguf", "context": size, "chunks": 2, "tokens": 16, "error": 0.0}


COMPARED = """\
PPL = 4.4817 ± 2.2408 (1 chunk of 64 tokens)
PPL of the base = 2.7183 ± 1.3591
PPL / PPL of the base = 1.648721 ± 0.000000
mean KL divergence = 0.500000 ± 0.250000
same top token = 50.000% ± 50.000%
change of p, rms = 12.500% ± 0.000%

         KL divergence  change of p
mean          0.500000       0.000%
maximum       0.750000      12.500%
99.9%         0.749500      12.475%
99%           0.745000      12.250%
95%           0.725000      11.250%
90%           0.700000      10.000%
75%           0.625000       6.250%
50%           0.500000       0.000%
25%           0.375000      -6.250%
10%           0.300000     -10.000%
5%            0.275000     -11.250%
1%            0.255000     -12.250%
0.1%          0.250500     -12.475%
minimum       0.250000     -12.500%
made with: what it was
"""


def test_perplexity_compares_with_a_base(tiny: str, monkeypatch, capsys):
    from localllm.files import logits_file

    heard: list[Any] = []
    base = SimpleNamespace(chunks=np.zeros((9, 64), np.int32))
    monkeypatch.setattr(logits_file.LogitsFile, "open", lambda path: heard.append(path) or base)
    monkeypatch.setattr(perplexity_service, "PerplexityRunner", lambda *arguments: Reads(heard, "what\nit was"))
    invoke("perplexity", tiny, "--kl-divergence", "--base", "b", "--chunks", "5")
    out, _ = capsys.readouterr()
    assert out == COMPARED and heard == ["b", 5, "closed"]
    invoke("perplexity", tiny, "--kl-divergence", "--base", "b", "--json")
    assert json.loads(capsys.readouterr().out)["made_with"] == "what\nit was" and heard[-2] is None


# ---- importance


class Collector:
    """A collector of known importances."""

    warnings, total, done = ("it is small",), 3, 1

    def __init__(self, heard: list[Any], arguments: tuple):
        self.heard, self.told = heard, arguments

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *error: object) -> None:
        self.heard.append("closed")

    def read(self) -> Iterator[int]:
        yield from (2, 3)

    def compute_matrix(self) -> ImportanceMatrix:
        return ImportanceMatrix(
            {"a": SquaredActivations(np.ones((1, 4), np.float32), np.array([2.0]))}, ("t",), 3, self.told[3]
        )

    def remove_part(self) -> None:
        self.heard.append("forgotten")


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", (512, None, False, False, None)),
        ("-c 100 --chunks 4 --parse-special --process-output -t 3", (100, 4, True, True, 3)),
    ],
)
def test_imatrix_writes_and_merges_files(line: str, arguments: tuple, tiny: str, monkeypatch, capsys, tmp_path):
    """Write what was collected; merge files without a model."""
    heard: list[Any] = []

    def collector(*parameters: Any, progress: Any) -> Collector:
        heard.append(parameters)
        return Collector(heard, parameters)

    monkeypatch.setattr(imatrix_service, "ImportanceCollector", collector)
    (tmp_path / "text").write_text("text")
    text, out, both = (str(tmp_path / name) for name in ("text", "out", "both"))
    invoke("imatrix", tiny, text, "-o", out, *line.split())
    assert heard == [(tiny, (text,), out, *arguments), "forgotten", "closed"]
    assert capsys.readouterr() == ("", "localllm: warning: it is small\n")
    imatrix = read_imatrix(out)
    assert (imatrix.chunks, imatrix.chunk_size, imatrix.squares["a"].counts.tolist()) == (3, arguments[0], [2.0])
    invoke("imatrix", "--in-file", out, "--in-file", out, "-o", both)
    assert read_imatrix(both).squares["a"].counts.tolist() == [4.0] and len(heard) == 3
    invoke("imatrix", tiny, text, "--in-file", both, "-o", out, *line.split())
    assert read_imatrix(out).squares["a"].counts.tolist() == [6.0]
    for words, reason in (([], "MODEL is missing"), ([tiny], "TEXT is missing")):
        with pytest.raises(UsageError, match=reason):
            invoke("imatrix", *words, "-o", out)


# ---- conversations


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Write a session, the only one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with sessions.SessionFile("trip") as file:
        file.chat.model = sessions.SessionModel("Tiny", str(tmp_path / "m.gguf"), "f")
        file.write([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    return tmp_path / "m.gguf"


def test_sessions_are_listed_shown_and_removed(session, capsys):
    for words in ((), ("list",)):
        invoke("sessions", *words)
        header, row = capsys.readouterr().out.splitlines()
        assert header.split() == ["session", "last", "used", "messages", "first", "question", "model"]
        assert row.split()[0] == "trip" and row.split()[-3:] == ["2", "q", "Tiny"]
    invoke("sessions", "show", "trip")
    assert capsys.readouterr() == ("user: q\n\nassistant: a\n", "")
    for action in ("show", "rm"):
        with pytest.raises(UsageError, match=f"NAME is missing: localllm sessions {action} NAME"):
            invoke("sessions", action)
        with pytest.raises(UsageError, match="session 'none' not found"):
            invoke("sessions", action, "none")
    invoke("sessions", "rm", "trip")
    invoke("sessions")
    assert capsys.readouterr() == ("", "") and sessions.list_names() == []


def test_the_model_of_a_session_is_found_by_name_or_path(session):
    with pytest.raises(UsageError, match=r"the model of session 'trip' no longer exists: .*m\.gguf"):
        chat_session.get_session_model("trip")
    session.write_bytes(b"")
    assert (chat_session.get_session_model("trip"), chat_session.get_session_model("new")) == (str(session), None)
    for model in (sessions.SessionModel("x", "", ""), sessions.SessionModel("x", "u", "endpoint x")):
        with sessions.SessionFile("trip") as file:
            file.chat.model = model
            file.rewrite()
        if not model.path:
            assert chat_session.get_session_model("trip") is None
    with pytest.raises(UsageError, match="'trip' was started with a server; resume it with --endpoint u"):
        chat_session.get_session_model("trip")


def test_invalid_session_names_are_refused_first(monkeypatch):
    """Refuse them before reading from the terminal."""
    with pytest.raises(UsageError, match=r"\.\./trip"):
        chat_session.select_session("../trip", False)
    with pytest.raises(UsageError, match="give either --session or --continue"):
        chat_session.select_session("trip", True)
    with pytest.raises(UsageError, match="sessions need a terminal"):
        chat_session.select_session("trip", False)
    assert chat_session.select_session(None, False) is None


@pytest.mark.parametrize(
    ("typed", "text", "asked"),
    [
        ("one\n", "one", 1), ("one", "one", 1), ("one\\\ntwo\n", "one\ntwo", 2), ('"""\na\n\nb"""\n', "a\n\nb", 4),
        ("one\\\n", "one\n", 2), ("\n", "before", 1),
    ],
)  # fmt: skip
def test_multi_line_input_works_on_a_dumb_terminal(typed: str, text: str, asked: int, monkeypatch, capsys):
    """Show a text that continues on the next line, and send it by an empty line."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    before = "before" * (text == "before")
    assert PlainLineEditor().read(before) == text
    shown = "before\n" * bool(before)
    assert capsys.readouterr() == ("", shown + "> " + "  " * (asked - 1))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(EOFError):
        PlainLineEditor().read()


# ---- small things that are told


def test_inspect_prints_the_chat_template(tmp_path, capsys):
    path = write_tiny_model(tmp_path / "m.gguf", chat_template="{{ messages }}")
    invoke("inspect", path, "--template")
    assert capsys.readouterr() == ("{{ messages }}\n", "")
    bare = write_tiny_model(tmp_path / "bare.gguf", chat_template=None)
    with pytest.raises(ModelError, match="the file has no chat template; `run` takes one with --chat-template NAME"):
        invoke("inspect", bare, "--template")


@pytest.mark.parametrize(("version", "warns"), [(0, True), (3, False)])
def test_tools_warn_where_commands_cannot_be_confined(version: int, warns: bool, monkeypatch, capsys):
    monkeypatch.setattr(confined, "get_landlock_version", lambda: version)
    tool_options.warn_unconfined()
    assert ("check each command before you allow it" in capsys.readouterr().err) == warns


def test_serve_prints_its_models_and_address(capsys):
    serve.print_ready(SimpleNamespace(paths={"a": "/a", "b": "/b"}), "http://x:1")
    assert capsys.readouterr().err == "localllm: serving a, b at http://x:1; Ctrl-C stops the server\n"


def test_cut_answers_are_reported_if_they_were_constrained(capsys):
    formed, free = GenerationOptions(constraint=make_constraint(regex="a")), GenerationOptions()
    cases = (formed, ["stop", "length"], True), (formed, ["stop"], False), (free, ["length"], False)
    for chosen, reasons, cut in cases:
        shape.warn_cut(chosen, reasons)
        warning = "localllm: warning: the answer was cut off before it matched its regex; raise -n or the context\n"
        assert capsys.readouterr().err == warning * cut


@pytest.mark.parametrize(
    ("attributes", "line"),
    [
        ({}, "Tiny · Q8_0 · 64 tokens of context · /help"), ({"name": ""}, "m · Q8_0 · 64 tokens of context · /help"),
        ({"device": "H200", "context": 0}, "Tiny · Q8_0 · H200 · /help"),
        ({"device": ""}, "Tiny · Q8_0 · 64 tokens of context · /help"),
    ],
)  # fmt: skip
def test_chat_prints_the_model_it_talks_to(attributes: Told, line: str, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(chat, "say_dim", lines.append)
    model = Opened("/x/m.gguf")
    vars(model).update(attributes)
    chat.show_model(model)
    assert lines == [line]


# ---- tokens

PIECES = {7: b"a\n", 8: "ä".encode()[:1], 9: "ü".encode()}
TOKENS = {
    "": '7\t"a\\n"\n8\t"\\\\xc3"\n9\t"ü"\n', "--ids": "[7, 8, 9]\n",
    "--json": '[{"id": 7, "piece": "a\\n"}, {"id": 8, "piece": "\\\\xc3"}, {"id": 9, "piece": "ü"}]\n',
}  # fmt: skip


@pytest.mark.parametrize("line", TOKENS)
def test_tokenize_prints_tokens_of_a_text_file_or_stdin(line: str, tiny: str, monkeypatch, capsys, tmp_path):
    """Keep a file's last line break, and drop that of piped text."""
    heard: list[Any] = []

    def encode(text: str, special: bool, bos: bool) -> list[int]:
        heard.append((text, special, bos))
        return [*PIECES]

    tokenizer = SimpleNamespace(
        warnings=["it is odd"] if line else [], encode=encode,
        token_bytes=lambda token, special: PIECES[token] if special else b"",
    )  # fmt: skip
    monkeypatch.setattr("localllm.api.open_tokenizer", lambda path: tokenizer)
    (tmp_path / "text").write_bytes("ä\n".encode("utf-16"))
    for words in (["x\n"], ["-f", tmp_path / "text"], []):
        invoke("tokenize", tiny, *words, *line.split(), stdin=b"y\n")
        assert capsys.readouterr() == (TOKENS[line], "localllm: warning: it is odd\n" * bool(line))
    invoke("tokenize", tiny, "--encoding", "latin-1", *line.split(), stdin=b"\xe4\n")
    assert heard == [("x\n", True, True), ("ä\n", True, True), ("y", True, True), ("ä", True, True)]
    capsys.readouterr()
    monkeypatch.setattr(tokenize, "is_terminal", lambda stream: True)
    with pytest.raises(UsageError, match="TEXT is missing: give a text, or pipe one to stdin"):
        invoke("tokenize", tiny)


# ---- vectors of some records


class Embedder:
    """An embedder that counts letters in batches and refuses some texts at once or when read."""

    warnings, width, tokens = ("it is small",), 1, 24

    def __init__(self, chunk: int):
        self.chunk, self.asked = chunk, list[Any]()

    def tokenize(self, text: str, options: EmbedOptions, name: str) -> None:
        self.asked.append((text, options.overflow, name))
        if text.startswith("long"):
            raise UsageError(f"{name} is too long")

    def embed(self, texts: list[str], options: Any, progress: Any) -> np.ndarray:
        if any(text.startswith("odd") for text in texts):
            raise UsageError("it is odd")
        return np.array([len(text) for text in texts], np.float32)[:, None]


def test_embed_reports_records_without_vectors(tiny: str, monkeypatch, capsys):
    """Print a line for each and set the exit code; a failed batch names all its texts."""
    embedder = Embedder(1)
    monkeypatch.setattr(embed_service, "open_embedder", lambda job: nullcontext(embedder))
    with pytest.raises(RecordsError, match=r"^2 records failed; see the error field of their output lines$"):
        invoke("embed", tiny, "--overflow", "cut", "--stats", stdin=b"a\nlong\nodd\nbbb\n")
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": 1, "embedding": [1]}, {"id": 2, "error": "text 2 is too long"}, {"id": 3, "error": "it is odd"},
        {"id": 4, "embedding": [3]},
    ]  # fmt: skip
    assert embedder.asked == [(text, "cut", f"text {n}") for n, text in enumerate(("a", "long", "odd", "bbb"), 1)]
    assert err.startswith("localllm: warning: it is small\n24 tokens in 0.") and err.count("\n") == 2
    embedder.chunk = 3
    invoke("embed", tiny, "--format", "plain", stdin=b"a\nbb\nccc\ndddd\n")
    assert capsys.readouterr().out == "1\n2\n3\n4\n"
    with pytest.raises(RecordsError, match=r"^1 records failed"):
        invoke("embed", tiny, stdin=b"long\na\nb\nc\n")
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3, 4]
    assert [name for _, _, name in embedder.asked[-4:]] == [f"text {number}" for number in (1, 2, 3, 4)]
    with pytest.raises(UsageError, match=r"^it is odd$"):
        invoke("embed", tiny, stdin=b"a\nodd\n")


def test_near_prints_the_nearest_texts_or_files(tiny: str, monkeypatch, capsys, tmp_path):
    """Skip texts whose vectors are cached."""
    asked: list[Any] = []

    class Near(Embedder):
        context = 99

        def get_usual_role(self, role: str) -> str:
            return role

        def embed(self, texts: list[str], options: Any, progress: Any = None) -> np.ndarray:
            asked.append((texts, options.role))
            return np.array([[len(text), 1] for text in texts], np.float32) / 10

    def vectors(cache: Any, keys: list[Any], make: Any) -> np.ndarray:
        cache.found = 1
        return make(keys)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embed_service.VectorCache, "embed", vectors)
    monkeypatch.setattr(embed_service, "get_cache_key", lambda text: text)
    monkeypatch.setattr(embed_service, "open_embedder", lambda job: nullcontext(Near(9)))
    invoke("embed", tiny, "--near", "xx", "--top", "2", "--as", "document", "--stats", stdin=b"a\nb  bb\ncc\n")
    out, err = capsys.readouterr()
    assert out == "0.1100\tb bb\n0.0500\tcc\n"
    assert asked == [(["xx"], "query"), (["a", "b  bb", "cc"], "document")]
    assert err.splitlines()[1] == "1 of 3 vectors were cached" and err.splitlines()[2].startswith("24 tokens in 0.")
    (tmp_path / "text").write_text("a text")
    invoke("embed", tiny, "--near", "xx", "--files", tmp_path / "text")
    assert capsys.readouterr().out == f"0.2300\t{tmp_path / 'text'}:1\ta text\n"
    assert asked[-2:] == [(["xx"], "query"), (["text\na text"], "document")]


# ---- models that are there


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Use an empty models folder; stdin and stderr are terminals."""
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setattr(rm, "is_terminal", lambda stream: True)
    return tmp_path


def test_list_without_models_suggests_pull(folder, monkeypatch, capsys):
    messages: list[str] = []
    monkeypatch.setattr(list_command, "say_dim", messages.append)
    invoke("list")
    assert messages == ["no models yet; `localllm list --all` lists models that `localllm pull` can download"]
    invoke("list", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result == {"folder": str(folder), "models": [], "names": {}}
    invoke("list", "--all", "--json")
    assert {"guide", "qwen3-4b"} <= {each["name"] for each in json.loads(capsys.readouterr().out)["known"]}
    invoke("list", "--all")
    assert capsys.readouterr().out.startswith("name ") and len(messages) == 1


@pytest.mark.parametrize(
    ("words", "typed", "there", "removed"),
    [
        ([], "y\n", (1, 1), True), ([], "n\n", (1, 1), False), ([], "", (1, 1), False), (["--force"], "", (0, 0), True),
        ([], "y\n", (1, 0), None), ([], "y\n", (0, 1), None),
    ],
)  # fmt: skip
def test_rm_asks_before_it_removes(
    folder, words: list[str], typed: str, there: tuple, removed: bool | None, monkeypatch, capsys
):
    path, messages = write_tiny_model(folder / "m.gguf"), list[str]()
    monkeypatch.setattr(rm, "say_dim", messages.append)
    monkeypatch.setattr(rm, "is_terminal", lambda stream: there[stream is sys.stdin])
    monkeypatch.setattr(rm, "confirm", lambda question: messages.append(question) or typed == "y\n")
    if removed is None:
        with pytest.raises(
            UsageError, match="m: cannot ask for confirmation without a terminal; remove it with --force"
        ):
            invoke("rm", "m")
    else:
        taken = render.format_size(path.stat().st_size)
        invoke("rm", "m", *words)
        asked = [] if words else [f"Remove m ({taken}, {path})?"]
        assert messages == asked + [f"{taken} removed"] * removed
    assert path.exists() == (not removed)


def test_rm_reports_a_file_that_cannot_be_removed(folder, monkeypatch):
    path = write_tiny_model(folder / "m.gguf")

    def refuse(path: Any, missing_ok: bool = False) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(LocalllmError, match=r"m\.gguf: cannot be removed: not yours$"):
        invoke("rm", "--force", "m")
    assert path.exists()


@pytest.mark.parametrize(("megabytes", "size"), [(0, ""), (1500, " (about 1.5 GB)")])
def test_a_missing_model_is_offered_with_its_size(megabytes: int, size: str, monkeypatch):
    asked: list[str] = []
    missing = MissingError(HubReference("qwen3-4b", "a/b", megabytes=megabytes))
    monkeypatch.setattr(pulling, "confirm", lambda question: bool(asked.append(question)))
    with pytest.raises(MissingError):
        pulling.offer_pull(missing)
    assert asked == [f"qwen3-4b is not on this computer. Download it{size}?"]


# ---- opened models


def test_opening_a_model_prints_its_warnings(tiny: str, monkeypatch, capsys):
    model = SimpleNamespace(warnings=["it is small", "it is odd"])
    monkeypatch.setattr("localllm.api.open_with_options", lambda *arguments: model)
    assert opening.open_model(tiny, EngineFlags(cache=CacheFlags(), rope=RopeFlags(), adapters=AdapterFlags())) is model
    assert capsys.readouterr().err == "localllm: warning: it is small\nlocalllm: warning: it is odd\n"


@pytest.mark.parametrize("warning", ["", "the disk is full"])
@pytest.mark.parametrize(
    ("writes", "stopped", "expected"),
    [(False, False, [True]), (True, False, ["end", True]), (True, True, ["end", True, False])],
)
def test_the_prefix_cache_is_written_after_the_answer(writes, stopped, expected, warning, monkeypatch, capsys):
    """Let readers go first; Ctrl-C skips the rest."""
    did: list[Any] = []

    def close(wait: bool = True) -> None:
        did.append(wait)
        if stopped and len(did) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(opening.terminal, "end_output", lambda: did.append("end"))
    opening.finish_writes(SimpleNamespace(prefixes=None))
    kept = SimpleNamespace(is_writing=writes, close=close, warning=warning)
    session = SimpleNamespace(cache=SimpleNamespace(collect=lambda: None))
    opening.finish_writes(SimpleNamespace(prefixes=kept, session=session))
    assert did == expected and capsys.readouterr().err == f"localllm: warning: {warning}\n" * bool(warning)


def test_a_draft_model_is_opened_by_name(tiny: str):
    """Open it with the target model; other words select a proposer, and endpoints have their own."""
    chosen, asked = GenerationOptions(), list[Any]()
    model = SimpleNamespace(file=1, resolve_drafter=lambda name, progress: asked.append(name) or "ngram")
    for other in ("auto", "off", "ngram"):
        assert opening.open_draft_model(model, chosen, other) is chosen
    assert opening.open_draft_model(model, chosen, f"draft:{tiny}").speculate == "ngram" and asked == [f"draft:{tiny}"]
    with pytest.raises(
        UsageError,
        match=r"^speculate must not name a draft model with --endpoint: give the server a draft model instead$",
    ):
        opening.open_draft_model(SimpleNamespace(file=None), chosen, "draft:x")
    assert opening.get_unlimited() > 1 << 60
