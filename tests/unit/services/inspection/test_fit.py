"""Test what a model costs: bytes read per token, multiply-adds, the longest context."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch.layer_state import KVType, PagedState, count_cache_bytes
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.quant.formats import BY_NAME
from localllm.services.hub import huggingface, pull
from localllm.services.hub.catalogue import MissingError, load_registry
from localllm.services.inspection import fit
from localllm.services.inspection import fit as ranking
from localllm.services.inspection.fit import (
    SHARE,
    WORKING_BYTES,
    describe_file,
    estimate_fit,
    estimate_streaming,
    find_longest_context,
)
from localllm.services.inspection.inspect import MatrixCosts


def tensors(*shapes_by_name: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors_made = {}
    for name, shape in shapes_by_name:
        data = np.zeros((*shape[:-1], BY_NAME["Q8_0"].row_bytes(shape[-1])), np.uint8)
        tensors_made[name] = Tensor(name, BY_NAME["Q8_0"], shape, data)
    return tensors_made


EMBEDDING, OUTPUT = ("token_embd.weight", (100, 64)), ("output.weight", (100, 64))
LAYER = ("blk.0.attn_q.weight", (64, 64)), ("blk.0.attn_norm.weight", (64,))
EXPERTS = ("blk.0.ffn_up_exps.weight", (8, 32, 64))


def nbytes(*shape: int) -> int:
    return int(np.prod(shape)) // 32 * 34


def test_costs_count_the_weights_that_a_token_reads():
    apart = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT, *LAYER))
    of_one_row = nbytes(100, 64)
    assert apart == MatrixCosts(nbytes(100, 64) + nbytes(64, 64), 64 * 64, 6400, table_bytes=of_one_row)
    tied = MatrixCosts.from_tensors(tensors(EMBEDDING, *LAYER))  # whose embedding is the output matrix, too
    assert tied == replace(apart, table_bytes=0)
    per_layer = MatrixCosts.from_tensors(tensors(EMBEDDING, ("per_layer_token_embd.weight", (100, 128)), *LAYER))
    assert per_layer == replace(apart, table_bytes=nbytes(100, 128))
    routed = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT, *LAYER, EXPERTS), 2)
    assert routed.weight_bytes == apart.weight_bytes + 2 * nbytes(32, 64)
    assert (routed.per_token, routed.per_logits) == (64 * 64 + 2 * 32 * 64, 6400)
    shared = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT, *LAYER, ("blk.0.ffn_up_shexp.weight", (32, 64))), 2)
    assert shared.per_token == 64 * 64 + 32 * 64  # all tokens go there


def test_only_stacked_expert_tensors_count_as_experts():
    """Count matrices with an expert's name, and other stacks, for every token."""
    usual = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT))
    named, stack = ("blk.0.ffn_up_exps.weight", (32, 64)), ("blk.0.ffn_up.weight", (2, 32, 64))
    for tensor in (named, stack):
        costs = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT, tensor), 2)
        assert costs.weight_bytes == usual.weight_bytes + nbytes(*tensor[1])
        assert (costs.per_token, costs.per_logits) == (np.prod(tensor[1]), 6400)
    unused = MatrixCosts.from_tensors(tensors(EMBEDDING, OUTPUT, EXPERTS))
    assert unused == replace(usual, all_expert_bytes=8 * nbytes(32, 64))


def test_the_number_of_used_experts_is_read_from_the_metadata():
    file: Any = SimpleNamespace(
        tensors=tensors(EMBEDDING, OUTPUT, EXPERTS), metadata={"general.architecture": "x", "x.expert_used_count": 3}
    )
    assert MatrixCosts.from_file(file) == MatrixCosts.from_tensors(file.tensors, 3)
    file.metadata = {"general.architecture": "y"}
    assert MatrixCosts.from_file(file).per_token == 0


@pytest.mark.parametrize(
    ("costs", "available", "held", "read"),
    [
        (MatrixCosts(1000, 1, 1), 600, 600, 400),
        (MatrixCosts(1000, 1, 1, 200, 1600), 800 + 1200, 2000, 50),  # three quarters of the experts are cached
        (MatrixCosts(1000, 1, 1, 200, 1600), 600, 600, 400),
    ],
)
def test_a_model_larger_than_memory_is_bound_by_the_disk(costs, available, held, read, monkeypatch, tmp_path):
    monkeypatch.setattr(fit, "measure_disk", lambda file: 5000.0)
    file: Any = SimpleNamespace(path=str(tmp_path))
    found = estimate_streaming(file, costs, available + WORKING_BYTES, 1e12, lambda text: None)
    assert found == {"held_bytes": held, "read_bytes": read, "disk_gbs": 5e-6, "tokens_per_s": 5000.0 / read}
    file.path = str(tmp_path / "missing")
    assert estimate_streaming(file, costs, available + WORKING_BYTES, 1e12, lambda text: None) is None


def test_fit_estimates_memory_and_tokens_per_second():
    costs, row = MatrixCosts(1000, 1, 1), {"total_bytes": 5000, "cache_bytes": 400}
    estimated = estimate_fit(row, "f16", costs, 5000 + WORKING_BYTES, 7e6)
    assert estimated == {
        **row,
        "kv_type": "f16",
        "needed_bytes": 5000 + WORKING_BYTES,
        "fits": True,
        "tokens_per_s": pytest.approx(SHARE * 7e6 / 1400),
    }
    assert (
        not estimate_fit(row, "f16", costs, 4999 + WORKING_BYTES, 7e6)["fits"]
        and estimate_fit(row, "f16", costs, 0, None)["tokens_per_s"] is None
    )


def test_the_longest_context_fills_the_memory():
    states, kind = [PagedState(0, 2, 16, 16)], KVType.parse("f16")
    h: Any = SimpleNamespace(context=1000, list_states=lambda: states)
    for tokens in (0, 1, 63, 64, 65, 500, 999, 1000):
        room = count_cache_bytes(states, tokens, kind)
        most = max(n for n in range(1001) if count_cache_bytes(states, n, kind) <= room)
        assert find_longest_context(h, 10, kind, 10 + WORKING_BYTES + room) == most >= tokens
    assert find_longest_context(h, 10, kind, WORKING_BYTES) == 0 and find_longest_context(h, 0, kind, 10**12) == 1000


def test_fit_describes_a_file_by_context_and_kv_type(model_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "measure_bandwidth", lambda: 5e9)
    monkeypatch.setattr(fit, "get_available_memory", lambda mapped: 10**9)
    progress = list[str]()
    with GGUFFile.open(model_path("llama")) as file:
        facts = describe_file(file, progress.append, None, 7)
        assert (
            progress == ["measuring the memory's bandwidth"]
            and facts["bandwidth_gbs"] == 5.0
            and facts["projector_bytes"] == 7
        )
        assert (
            [*facts["longest"]]
            == ["f16", "q8_0", "q4_0"]
            == list(dict.fromkeys(row["kv_type"] for row in facts["rows"]))
        )
        least, most = (
            [row["cache_bytes"] for row in describe_file(file, progress.append, 64, 0, kinds)["rows"]]
            for kinds in (("iq4_nl",), ("k=q5_1,v=bf16",))
        )
        assert least[0] * (24 / 32 + 2) == most[0] * 2 * 18 / 32
        assert facts["longest"]["f16"] == facts["context"] and facts["available_bytes"] == 10**9
        alone = describe_file(file, progress.append, 16)
        assert [row["context"] for row in alone["rows"]] == [16] * 3 and alone["projector_bytes"] == 0
        assert (
            facts["rows"][0]["total_bytes"] - facts["rows"][0]["cache_bytes"] >= file.nbytes - facts["table_bytes"] + 7
        )
        assert (
            describe_file(file, progress.append, facts["context"])["rows"]
            and describe_file(file, progress.append, 1)["rows"]
        )
        for odd in (0, facts["context"] + 1):
            with pytest.raises(UsageError, match=f"context must be from 1 to {facts['context']}"):
                describe_file(file, progress.append, odd)


def test_fit_describes_an_embedding_model(model_path, monkeypatch: pytest.MonkeyPatch):
    """Keep one layer's keys: one type, the longest text only, and no tokens per second."""
    monkeypatch.setattr(fit, "measure_bandwidth", lambda: 5e9)
    monkeypatch.setattr(fit, "get_available_memory", lambda mapped: 10**9)
    with GGUFFile.open(model_path("bert")) as file:
        for context in (None, 5):
            facts = describe_file(file, lambda what: None, context)
            assert [(row["context"], row["kv_type"], row["tokens_per_s"]) for row in facts["rows"]] == [
                (facts["context"], "f16", None)
            ]
            assert [*facts["longest"]] == ["f16"] and facts["projector_bytes"] == 0
        file.tensors.clear()
        with pytest.raises(
            ModelError, match=f"^{file.path}: the file contains a vocabulary only; give a file with weights$"
        ):
            describe_file(file, lambda what: None, None)


def test_the_bandwidth_is_measured_on_all_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("localllm.engine.cpu.limits.measure_read_bandwidth", lambda threads: threads * 1e9)
    monkeypatch.setattr("localllm.system.cpu.count_usable_cores", lambda: 3)
    assert fit.measure_bandwidth() == 3e9


def test_fit_of_a_local_file_counts_its_projector(model_path, monkeypatch: pytest.MonkeyPatch):
    """Fetch nothing."""
    path, calls = str(model_path("llama")), []
    monkeypatch.setattr(fit.catalogue, "resolve_model", lambda model: path)
    monkeypatch.setattr(fit, "get_projector_size", lambda model: 7 if model == path else 0)
    monkeypatch.setattr(
        fit, "describe_file", lambda file, *more, lora: calls.append((file.path, *more)) or {"rows": []}
    )
    hears = calls.append
    assert fit.describe_fit("name", hears, 9) == {"model": "name", "path": path, "fetched_bytes": 0, "rows": []}
    assert fit.describe_fit("name")["rows"] == [] and calls[0] == (path, hears, 9, 7, fit.TYPES)
    assert calls[1][2:] == (None, 7, fit.TYPES)
    fit.describe_fit("name", kv_type="k=q5_1,v=iq4_nl")
    assert calls[2][4] == ("k=q5_1,v=iq4_nl",)
    assert (WORKING_BYTES, SHARE, fit.TYPES) == (300_000_000, 0.7, ("f16", "q8_0", "q4_0"))


def test_fit_of_a_model_on_the_hub_fetches_its_header_and_counts_its_projector(monkeypatch: pytest.MonkeyPatch):
    reference: Any = SimpleNamespace(repository="tiny/T", text="hf:tiny/T:x", size="")

    def missing(model: str) -> str:
        raise MissingError(reference)

    @contextmanager
    def remote_model(repository: Any, files: Any) -> Iterator[tuple[Any, int]]:
        yield SimpleNamespace(path=f"hf:{repository}/{files[0].name}"), 77

    monkeypatch.setattr(fit.catalogue, "resolve_model", missing)
    monkeypatch.setattr(huggingface, "HubRepository", lambda name: name)
    monkeypatch.setattr(
        pull, "list_model_files", lambda repository, arguments: [SimpleNamespace(name="a.gguf", size=100)]
    )
    monkeypatch.setattr(
        pull, "list_projectors", lambda repository, own: [SimpleNamespace(size=3), SimpleNamespace(size=4)]
    )
    monkeypatch.setattr(pull, "open_remote_model", remote_model)
    calls, heard = list[Any](), list[str]()
    monkeypatch.setattr(fit, "describe_file", lambda *arguments, lora: calls.append(arguments) or {"rows": []})
    facts = fit.describe_fit("name", heard.append, 9)
    assert facts == {"model": "hf:tiny/T:x", "path": "hf:tiny/T/a.gguf", "fetched_bytes": 77, "rows": []}
    assert heard == ["reading the header of hf:tiny/T:x"] and calls[0][1:] == (heard.append, 9, 7, fit.TYPES)


@pytest.mark.parametrize(("available", "context", "code"), [(10**12, (), 0), (10, (), 5), (10, ("-c", "7"), 5)])
def test_fit_exits_with_5_if_a_model_does_not_fit(
    model_path, monkeypatch: pytest.MonkeyPatch, cli, available: int, context: tuple[str, ...], code: int
):
    monkeypatch.setattr(fit, "measure_bandwidth", lambda: 5e9)
    monkeypatch.setattr(fit, "get_available_memory", lambda mapped: available)
    for form in ((), ("--json",)):
        assert cli("fit", model_path("llama"), *context, *form)[0] == code


@pytest.fixture
def here(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a model and a broken file, and a memory of 5 GB read at 10 GB/s."""
    shutil.copy(tiny, tmp_path / "small.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setattr(ranking, "find_models", lambda name_of: [])
    monkeypatch.setattr(ranking, "measure_bandwidth", lambda: 10e9)
    monkeypatch.setattr(ranking, "get_available_memory", lambda mapped=0: 5_000_000_000)
    monkeypatch.setattr("localllm.services.inspection.fit.get_available_memory", lambda mapped=0: 5_000_000_000)
    return tmp_path


def test_fit_all_has_a_line_for_every_model(here: Path):
    facts = ranking.rank_models(context=32)
    rows = {row["name"]: row for row in facts["models"]}
    assert rows.keys() == {*load_registry(), "small", "broken"} and "problem" in facts["models"][-1]
    assert rows["small"]["here"] and rows["small"]["context"] == 32 and rows["small"]["cache_bytes"] > 0
    known = load_registry()["qwen3-30b-a3b"]
    absent, nbytes = rows["qwen3-30b-a3b"], known.megabytes * 10**6
    assert absent["needed_bytes"] == nbytes + WORKING_BYTES and not absent["fits"] and absent["cache_bytes"] is None
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
def test_fit_all_sorts_fitting_models_first(here: Path, order: str, key):
    rows = [row for row in ranking.rank_models(order)["models"] if "problem" not in row]
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    for part in (rows[: sum(fits)], rows[sum(fits) :]):
        assert [*map(key, part)] == sorted(map(key, part))


def test_fit_all_prints_a_table_and_refuses_conflicting_arguments(here: Path, cli, refused):
    code, out, err = cli("fit", "--all", "--sort", "speed", "-c", 64)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split()[:3] == ["name", "memory", "tokens/s"]
    assert (
        any(line.startswith("small ") for line in lines) and "cannot run" in out and "of 64 tokens (f16)" in lines[-1]
    )
    for words, message in (
        (("fit",), "MODEL is missing: give one, or --all for all models"),
        (("fit", "small", "--all"), "give either MODEL or --all, not both"),
        (("fit", "--sort", "size"), "--sort needs --all"),
        (("fit", "--all", "--sort", "x"), "--sort must be size, speed, memory, not x"),
        (("fit", "--all", "--kv-type", "q9"), "unknown KV cache type"),
    ):
        refused(words, message)
