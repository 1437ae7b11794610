"""Test localllm perplexity --per-token: a row for each scored token, with the figures of the perplexity."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

import localllm

HEAD = ["chunk", "position", "token", "text", "logprob"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("hello there, how are you today? " * 20, encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def test_the_rows_give_the_perplexity(tiny: str, text: Path, tmp_path: Path, cli):
    out = tmp_path / "tokens.csv"
    status, printed, _ = cli("perplexity", tiny, text, "-c", "32", "--chunks", "3", "--per-token", out)
    rows = read_rows(out)
    assert status in (0, None) and [*rows[0]] == HEAD and len(rows) == 3 * 15
    mean = math.fsum(float(row["logprob"]) for row in rows) / len(rows)
    assert printed.startswith(f"PPL = {math.exp(-mean):.4f} ")
    assert [int(row["position"]) for row in rows[:15]] == [*range(17, 32)] and rows[15]["chunk"] == "2"
    with localllm.open(tiny, cache=False) as model:
        ids = model.tokenize(text.read_text(encoding="utf-8"), bos=True)
        assert [int(row["token"]) for row in rows[:15]] == ids[17:32]
        assert rows[0]["text"] == model.detokenize([ids[17]], special=True)


def test_a_comparison_has_the_bases_columns(tiny: str, text: Path, tmp_path: Path, cli):
    base, out = tmp_path / "base.kld", tmp_path / "tokens.csv"
    cli("perplexity", tiny, text, "-c", "32", "--chunks", "2", "--save-logits", base)
    cli("perplexity", tiny, "--kl-divergence", "--base", base, "--per-token", out)
    rows = read_rows(out)
    assert [*rows[0]] == [*HEAD, "base_logprob", "kl_divergence", "same_top"] and len(rows) == 2 * 15
    assert all(abs(float(row["logprob"]) - float(row["base_logprob"])) < 0.01 for row in rows)
    assert all(row["same_top"] == "1.0" and float(row["kl_divergence"]) < 0.01 for row in rows)


def test_only_a_table_of_tokens_is_replaced(tiny: str, text: Path, tmp_path: Path, cli):
    out = tmp_path / "notes.txt"
    out.write_text("mine", encoding="utf-8")
    status, _, err = cli("perplexity", tiny, text, "-c", "32", "--per-token", out)
    assert status == 2 and "is not a table of tokens; use --force" in err and out.read_text(encoding="utf-8") == "mine"
    out.write_text(",".join(HEAD) + "\n", encoding="utf-8")
    assert cli("perplexity", tiny, text, "-c", "32", "--chunks", "1", "--per-token", out)[0] in (0, None)
    assert len(read_rows(out)) == 15
    assert cli("perplexity", tiny, text, "-c", "32", "--per-token", text)[0] == 2


def test_tasks_have_no_table(tiny: str, text: Path, cli):
    status, _, err = cli("perplexity", tiny, text, "--hellaswag", "--per-token", "x.csv")
    assert status == 2 and "--hellaswag scores tasks" in err
