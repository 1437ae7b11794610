"""All that commands print, where what computes is a stand-in whose figures are known."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from invoked import Told, invoke

from localllm.errors import UsageError
from localllm.services import bench as bench_service
from localllm.services import bench_texts
from localllm.services import perplexity as perplexity_service
from localllm.services import rerank as rerank_service
from localllm.services.bench import Result, Test
from localllm.services.costs import MatrixCosts
from localllm.services.scores import Comparison, Prediction

Test.__test__ = False  # type: ignore[attr-defined]  # no test case

# ---- scores


class Ranker:
    """Scores texts by their lengths."""

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
        ("", "ccc\nbb\na\n"), ("--top 2", "ccc\nbb\n"), ("--scores --top 2", "0.750000\tccc\n0.500000\tbb\n"),
        ("--json --top 1", '{"id": 2, "score": 0.75, "input": "ccc"}\n'),
    ],
)  # fmt: skip
def test_rerank(line: str, shown: str, tiny: str, monkeypatch, capsys):
    ranker, engines = Ranker(), []
    monkeypatch.setattr(rerank_service, "reranker", lambda *told: engines.append(told) or nullcontext(ranker))
    words = ["-q", "x", "-c", "77", "-t", "3", "--device", "cpu", *line.split()]
    invoke("rerank", tiny, *words, stdin=b"a\nccc\nbb\n")
    out, err = capsys.readouterr()
    assert (out, err) == (shown, "localllm: warning: it is small\n")
    assert ranker.asked == [("x", ["a", "ccc", "bb"], False)]
    [(path, engine)] = engines
    assert (path, engine.context, engine.threads, engine.backend) == (tiny, 77, 3, "cpu")


def test_rerank_of_fields(tiny: str, monkeypatch, capsys):
    ranker = Ranker()
    monkeypatch.setattr(rerank_service, "reranker", lambda *told: nullcontext(ranker))
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
    """Measures what is known: a test of reading and one of writing."""

    lane, heard = "avx2", list[Any]()

    def __init__(self, path: str, on_step: Any, on_compile: Any):
        self.model = MODEL
        self.heard[:] = [path]

    def run(self, *told: Any) -> Iterator[Result]:
        self.heard.append(told)
        yield Result(Test(10, 0), 2, [500.0, 700.0], COSTS)
        yield Result(Test(0, 4), 2, [1000.0], COSTS, bandwidth=8e9)

    def report(self, results: list[Result]) -> Told:
        return {"tests": len(results), "model": self.model["arch"]}


ROWS = """\
| model | test | threads | tokens/s | arithmetic, avx2 | weights read |
| --- | --- | --: | --: | --: | --: |
| my\\|model | pp10 | 2 | 600.00 ± 141.42 | 4 GOPS |  |
| my\\|model | tg4 | 2 | 1000.00 ± 0.00 |  | 2.0 of 8.0 GB/s, 25% |
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", ([(512, 0), (0, 128)], None, 5, "f16", "auto", "auto")),
        ("-p 1,2 -n 0 -r 3 -t 1,2 --kv-type q8_0 --device cpu -ngl 4", ([(1, 0), (2, 0)], (1, 2), 3, "q8_0", "cpu", 4)),
        ("-p 0 -n 3 -pg 5,6 -ctk f32", ([(0, 3), (5, 6)], None, 5, "k=f32,v=f16", "auto", "auto")),
    ],
)  # fmt: skip
def test_bench(line: str, told: tuple, tiny: str, monkeypatch, capsys):
    monkeypatch.setattr(bench_service, "Bench", Bench)
    invoke("bench", tiny, *line.split())
    assert capsys.readouterr() == (ROWS, "")
    path, (tests, *others) = Bench.heard
    assert (path, [(test.prompt, test.generated) for test in tests], *others) == (tiny, *told)
    invoke("bench", tiny, "-d", "7", "--json")
    assert capsys.readouterr().out == '{"tests": 2, "model": "llama"}\n'
    assert [test.depth for test in Bench.heard[1][0]] == [7, 7]


TEXTS = [{"length": 16, "tokens_per_second": 1234.5, "deviation": 2.5, "texts_per_second": 77.16},
         {"length": 64, "tokens_per_second": 999.4, "deviation": 0.0, "texts_per_second": 15.6}]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", ((16, 64, 512), None, 5, "auto")), ("-p 512", ((16, 64, 512), None, 5, "auto")),
        ("-p 8,9 -t 3,4 -r 2 --device cpu", ((8, 9), 3, 2, "cpu")),
    ],
)  # fmt: skip
def test_bench_of_models_that_make_vectors(line: str, told: tuple, tiny: str, monkeypatch, capsys):
    heard: list[Any] = []

    def measured(path, lengths, threads, repetitions, told, progress, device):
        told("one")
        heard.append((lengths, threads, repetitions, device))
        return TEXTS

    monkeypatch.setattr(bench_texts, "measured", measured)
    monkeypatch.setattr(bench_texts, "makes_no_text", lambda path: True)
    invoke("bench", tiny, *line.split())
    assert heard == [told]
    assert capsys.readouterr() == (
        "texts of   tokens/s  texts/s\n16 tokens  1234 ± 2     77.2\n64 tokens   999 ± 0     15.6\n", "",
    )  # fmt: skip
    invoke("bench", tiny, "--json")
    assert json.loads(capsys.readouterr().out) == {"model": tiny, "results": TEXTS}


class Reads:
    """A model that reads chunks, of which it knows what comes of them."""

    path, warnings, trained_context, total, done = "/m.gguf", ["it is small"], 100, 3, 1
    tokenizer = SimpleNamespace(encode=lambda text, bos: [*range(1000)])

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
def test_perplexity(line: str, read: tuple, chunks: tuple, tiny: str, monkeypatch, capsys, tmp_path):
    """All that is printed, and the warnings."""
    heard: list[Any] = []

    def reader(path, size, threads, progress, kv_type):
        heard.append((path, size, threads, kv_type))
        return Reads(heard)

    monkeypatch.setattr(perplexity_service, "ChunkReader", reader)
    (tmp_path / "text").write_text("text")
    words = line.replace("OUT", str(tmp_path / "out")).split()
    saved = str(tmp_path / "out") if "OUT" in line else None
    invoke("perplexity", tiny, tmp_path / "text", *words)
    size = read[0]
    out, err = capsys.readouterr()
    assert out == f"PPL = 4.4817 ± 0.0000 (2 chunks of {size} tokens)\n"
    too_long = "localllm: warning: the model was trained for a context of 100 tokens\n" * (size > 100)
    assert err == f"localllm: warning: it is small\n{too_long}"
    assert heard == [(tiny, *read), (chunks, saved), "closed"]
    invoke("perplexity", tiny, tmp_path / "text", "--json", *words)
    told = json.loads(capsys.readouterr().out)
    assert told.pop("perplexity") == pytest.approx(np.exp(1.5))
    assert told == {"model": "/m.gguf", "context": size, "chunks": 2, "tokens": 16, "error": 0.0}


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


def test_perplexity_against_a_base(tiny: str, monkeypatch, capsys):
    from localllm.files import logits_file

    heard: list[Any] = []
    base = SimpleNamespace(chunks=np.zeros((9, 64), np.int32))
    monkeypatch.setattr(logits_file.Logits, "open", lambda path: heard.append(path) or base)
    monkeypatch.setattr(perplexity_service, "ChunkReader", lambda *told: Reads(heard, "what\nit was"))
    invoke("perplexity", tiny, "--kl-divergence", "--base", "b", "--chunks", "5")
    out, _ = capsys.readouterr()
    assert out == COMPARED and heard == ["b", 5, "closed"]
    invoke("perplexity", tiny, "--kl-divergence", "--base", "b", "--json")
    assert json.loads(capsys.readouterr().out)["made_with"] == "what\nit was" and heard[-2] is None
