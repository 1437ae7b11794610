"""Test that a run loads the kernel variants it needs, and that the others are compiled in the background."""

import itertools
import shutil
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from project import ROOT

from localllm.engine.cpu import lowering
from localllm.engine.cpu.kernel_variants import UNLIMITED, RunShape, VariantTable
from localllm.engine.lower.activation import ALL, WANTED, RoutedRows, RowSet
from localllm.kernels.build import objects
from localllm.kernels.build.library import KernelLibrary, Progress
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS, get_max_few_fast, get_max_few_tokens, select_variant

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from make_synthetic import SHAPES, write_model

PROMPT = [*range(1, 11)]  # few enough for every lane to read rows as in decode
ROUTED = RoutedRows("routed", None, ALL)


def called(format: str, columns: int, counts: Iterable[tuple[int, int]], most_precise: int) -> set[str]:
    """Return what the kernel calls for some pairs of tokens and kernel_tokens."""
    limits = get_max_few_tokens(format, columns), get_max_few_fast(format, columns)
    return {f"{VARIANTS[select_variant(*count, *limits, most_precise)]}-{format}" for count in counts}


def needed(format: str, columns: int, rows: RowSet, run: RunShape) -> set[str]:
    """Return what a run with one row of logits loads."""
    variants = VariantTable()
    variants.register(format, columns, rows, 512, False)
    names = variants.list_names(run)
    assert set(names) <= set(variants.list_all_names())
    return set(names)


@pytest.mark.parametrize("most_precise", [1, 128])
@pytest.mark.parametrize(("format", "columns"), [("Q4_K", 512), ("Q6_K", 512), ("Q4_1", 576)])
def test_a_run_loads_exactly_the_variants_that_its_products_call(format, columns, most_precise):
    for tokens, kernel_tokens in itertools.product((1, 2, 5, 20, 21, 30, 31, 48, 49, 128, 129, 512), repeat=2):
        run = RunShape(tokens, 1, kernel_tokens, 1, most_precise)
        assert needed(format, columns, ALL, run) == called(format, columns, [(tokens, kernel_tokens)], most_precise)
        assert needed(format, columns, WANTED, run) == called(format, columns, [(1, 1)], most_precise)
        precise = UNLIMITED if kernel_tokens <= most_precise else 0  # which the run decides, not the rows of an expert
        by_expert = [(count, 1 if kernel_tokens <= 128 else count) for count in range(1, tokens + 1)]
        assert needed(format, columns, ROUTED, run) == called(format, columns, by_expert, precise)


def test_decoding_any_number_of_sequences_selects_the_same_variant():
    few = VARIANTS.index("linear_few")
    assert {select_variant(tokens, 1, 20, 20, 128) for tokens in (2, 20, 21, 300)} == {few}
    assert select_variant(1, 60, 20, 20, 128) == select_variant(60, 60, 20, 20, 128) == VARIANTS.index("linear_precise")


def test_runs_in_tiles_load_no_variant():
    variants = VariantTable()
    variants.register("Q4_K", 512, ALL, 8, False)
    assert variants.list_names(RunShape(9, 1, 9, 1, 128)) == []
    assert variants.list_all_names() == ["linear_one-Q4_K", "linear_few-Q4_K", "linear_few_fast-Q4_K"]


def test_preparing_all_variants_leaves_nothing_to_load_for_later_runs(tmp_path, monkeypatch):
    asked, load = set[str](), KernelLibrary.load

    def counted(library: KernelLibrary, names: Iterable[str], progress: Progress | None = None) -> None:
        wanted = {*names}
        asked.update(wanted - library.addresses.keys())
        load(library, wanted, progress)

    monkeypatch.setattr(lowering, "has_tiles", lambda: False)
    monkeypatch.setattr(KernelLibrary, "load", counted)
    write_model(tmp_path / "model.gguf", SHAPES["tiny"], "Q4_K_M")
    with closing(open_engine(tmp_path / "model.gguf")) as engine:
        engine.prepare_all()
        assert asked
        asked.clear()
        for ids in ([1], PROMPT):
            engine.forward(ids, 0)
    assert not asked


def compilers() -> list[str]:
    """Return the ids of the processes that this one has started to compile kernels."""
    lines = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    pids = (pid for line in lines for pid in line)
    return [pid for pid in pids if b"localllm.kernels.build.compile" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_variants_are_compiled_in_the_background_of_runs_that_do_not_need_them(tmp_path, monkeypatch):
    """Check that answers equal those of a later start, no progress shows after the first, and compilers end."""
    monkeypatch.setattr(lowering, "has_tiles", lambda: False)  # in tiles a prompt as long needs none of them
    write_model(tmp_path / "model.gguf", SHAPES["tiny"], "Q4_K_M")
    with closing(open_engine(tmp_path / "model.gguf")) as engine:
        engine.prepare_all()
        expected = [engine.forward(ids, 0) for ids in ([1], PROMPT)]
    there = objects.get_object_folder()
    here = tmp_path / "kernels" / there.name
    monkeypatch.setattr(objects, "get_object_folder", lambda of=None: here)
    unwanted = shutil.ignore_patterns("linear_few-*", "linear_precise-*", "linear_fast-*")
    shutil.copytree(there, here, ignore=unwanted)
    here.chmod(0o700)
    here.parent.chmod(0o700)
    shown = []
    with closing(open_engine(tmp_path / "model.gguf", progress=lambda *numbers: shown.append(numbers))) as engine:
        np.testing.assert_array_equal(engine.forward([1], 0), expected[0])
        assert not compilers(), "there was all that it needed"
        np.testing.assert_array_equal(engine.forward(PROMPT, 0), expected[1])
        assert (compilers() or list(here.glob("linear_fast-*"))) and not shown  # on a busy machine they are done first
    assert not compilers()
    assert list(here.glob("linear_few-*")), "what was needed is there"
    assert not list(here.glob("*.tmp"))
