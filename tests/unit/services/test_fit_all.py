"""fit --all: a ranking of what is here and what can be pulled, nothing fetched."""

import shutil
from pathlib import Path

import pytest

from localllm.services import fit_all as ranking
from localllm.services.catalogue import registry_models
from localllm.services.fit import SHARE, WORKING


@pytest.fixture
def here(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a file that is none; a memory of 5 GB, read at 10 GB a second."""
    shutil.copy(tiny, tmp_path / "small.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setattr(ranking, "find_models", lambda name_of: [])
    monkeypatch.setattr(ranking, "measure_bandwidth", lambda: 10e9)
    monkeypatch.setattr(ranking, "available_memory", lambda mapped=0: 5_000_000_000)
    monkeypatch.setattr("localllm.services.fit.available_memory", lambda mapped=0: 5_000_000_000)
    return tmp_path


def test_every_model_has_a_line(here: Path):
    facts = ranking.fit_all(context=32)
    rows = {row["name"]: row for row in facts["models"]}
    assert rows.keys() == {*registry_models(), "small", "broken"} and "problem" in facts["models"][-1]
    assert rows["small"]["here"] and rows["small"]["context"] == 32 and rows["small"]["cache_bytes"] > 0
    known = registry_models()["qwen3-30b-a3b"]
    absent, nbytes = rows["qwen3-30b-a3b"], known.megabytes * 10**6
    assert absent["needed_bytes"] == nbytes + WORKING and not absent["fits"] and absent["cache_bytes"] is None
    assert absent["tokens_per_s"] == pytest.approx(SHARE * 10e9 / (nbytes * 3.3 / 30.5))
    assert rows["nomic-embed-text-1.5"]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("size", lambda row: -row["parameters"]),
        ("speed", lambda row: -(row["tokens_per_s"] or 0)),
        ("memory", lambda row: row["needed_bytes"]),
    ],
)
def test_orders(here: Path, order: str, key):
    """Models that fit come first; both groups are in order."""
    rows = [row for row in ranking.fit_all(order)["models"] if "problem" not in row]
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    for part in (rows[: sum(fits)], rows[sum(fits) :]):
        assert [*map(key, part)] == sorted(map(key, part))


def test_the_command(here: Path, cli):
    code, out, err = cli("fit", "--all", "--sort", "speed", "-c", 64)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split()[:3] == ["name", "memory", "tokens/s"]
    assert (
        any(line.startswith("small ") for line in lines) and "cannot run" in out and "with 64 tokens (f16)" in lines[-1]
    )
    for words, told in (
        (("fit",), "give a MODEL, or --all for all of them"),
        (("fit", "small", "--all"), "give either MODEL or --all, not both"),
        (("fit", "--sort", "size"), "--sort needs --all"),
        (("fit", "--all", "--sort", "x"), "--sort should be size, speed, memory, not x"),
        (("fit", "--all", "--kv-type", "q9"), "unknown type of KV cache"),
    ):
        code, out, err = cli(*words)
        assert (code, out) == (2, "") and told in err
