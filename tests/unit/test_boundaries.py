"""Test the boundaries of small functions of files and services: the last that fits, the first that does not."""

import hashlib
import itertools
import json
import math
import os
import struct
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.families import mamba2
from localllm.arch.metadata import HyperparameterReader
from localllm.cli import compat
from localllm.cli import compat as llama_names
from localllm.cli import open_model as opening
from localllm.cli.commands import config
from localllm.convert import rope_scaling
from localllm.convert.config import CheckpointConfig
from localllm.engine.runs import DEEP_POSITION, FIRST_RUN, RunPlan
from localllm.errors import LocalllmError, MemoryLimitError, ModelError
from localllm.files import logits_file
from localllm.files.cache import checksummed_cache, prefix_files
from localllm.files.cache import checksummed_cache as known
from localllm.files.cache.prefix_files import PrefixFile
from localllm.files.logits_file import LogitsWriter, compute_row_width, count_scored_tokens
from localllm.generation.reasoning import count_overlap
from localllm.kernels import machine
from localllm.quantizing import quantize
from localllm.services import receipts
from localllm.services.evaluation.scores import Comparison, compute_mean_with_error, compute_statistics, exponentiate
from localllm.system import cpu


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the user's cache folder."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- hashes of files ------------------------------------------------------------------------------------------------


def test_a_hash_is_cached(tmp_path, cache):
    path, heard = tmp_path / "x", []
    path.write_bytes(b"abc")
    right = hashlib.sha256(b"abc").hexdigest()
    for _ in range(2):
        assert checksummed_cache.get_sha256(path, lambda *progress: heard.append(progress)) == right
    assert heard == [(3, 3)]
    assert (cache / "sha256").stat().st_mode & 0o777 == 0o700


def test_hashing_reports_progress_and_works_without_a_cache(tmp_path, cache, monkeypatch):
    """Read an existing cache that cannot be written."""
    path, heard = tmp_path / "x", []
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(checksummed_cache, "CHUNK_BYTES", 4)
    cache.write_bytes(b"no folder")
    for _ in range(2):
        digest = checksummed_cache.get_sha256(path, lambda *progress: heard.append(progress))
        assert digest == hashlib.sha256(b"0123456789").hexdigest()
    assert heard == [(4, 10), (8, 10), (10, 10)] * 2
    cache.unlink()
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(name.encode())
        assert checksummed_cache.get_sha256(tmp_path / name) == hashlib.sha256(name.encode()).hexdigest()
    assert len(list((cache / "sha256").iterdir())) == 2


@pytest.mark.parametrize(
    "kept", ["0" * 63, "0" * 65, "g" * 64, "", "A" * 64, "é" * 64], ids=["short", "long", "other", "none", "case", "é"]
)
def test_an_invalid_cached_hash_is_computed_again(tmp_path, cache, kept: str):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    right = checksummed_cache.get_sha256(path)
    [file] = (cache / "sha256").iterdir()
    file.write_text(kept, encoding="utf-8")
    assert checksummed_cache.get_sha256(path) == right
    file.write_text("0" * 64)
    assert checksummed_cache.get_sha256(path) == "0" * 64, "what looks like one is"
    (cache / "sha256").chmod(0o777)
    assert checksummed_cache.get_sha256(path) == right, "but not where others can write"


def test_a_file_that_changes_while_it_is_hashed_is_not_cached(tmp_path, cache):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    checksummed_cache.get_sha256(path, lambda *progress: os.utime(path, (1, 1)))
    assert not (cache / "sha256").exists()


def test_cached_checks_are_private_and_bounded(cache):
    for number in range(4):
        known.record_check("vocabulary", str(number))
        [*files] = (cache / "known").glob(f"*-{number}")
        os.utime(files[0], (number + 1, number + 1))
    assert (cache / "known").stat().st_mode & 0o777 == 0o700
    known.remove_oldest(cache / "known", 4)
    assert all(known.is_recorded("vocabulary", str(number)) for number in range(4))
    known.record_check("vocabulary", "4")
    known.remove_oldest(cache / "known", 4)
    assert [known.is_recorded("vocabulary", str(number)) for number in range(5)] == [False] * 3 + [True] * 2


# ---- room on the disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, -1])
def test_logits_that_just_fit_the_disk_are_written(tmp_path, monkeypatch, spare: int):
    chunks = np.zeros((3, 16), np.int32)
    needed = 3 * count_scored_tokens(16) * compute_row_width(100) * 2
    monkeypatch.setattr(logits_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed + spare))
    if spare < 0:
        with pytest.raises(LocalllmError, match=r"3 chunks of logits take .* lower --chunks"):
            LogitsWriter(tmp_path / "x", chunks, 100)
    else:
        LogitsWriter(tmp_path / "x", chunks, 100)


ABOUT = prefix_files.PrefixChunkInfo("m", 7, "")
PARTS = {"a": np.arange(5, dtype=np.uint8), "none": np.zeros(0, np.uint8), "b": np.arange(9, dtype=np.uint8)}


def test_a_stored_prompt_is_whole_or_removed(cache):
    """Remove one that is cut off or has another key."""
    key, other = "0" * 32, "1" * 32
    prefix_files.write_prefix(key, ABOUT, PARTS)
    path = prefix_files.get_folder() / key
    data = path.read_bytes()
    size = int.from_bytes(data[8:12], "little")
    header = json.loads(data[12 : 12 + size])
    assert data[:8] == b"LLPREFX1" and header["about"] == {"model": "m", "end": 7, "before": ""}
    assert header["parts"] == [[name, part.nbytes, zlib.crc32(part)] for name, part in PARTS.items()]
    assert data[12 + size :] == struct.pack("<I", zlib.crc32(data[12 : 12 + size])) + bytes(range(5)) + bytes(range(9))
    with prefix_files.open_prefix(key) as kept:
        assert kept.about == ABOUT and kept.parts == {"a": 5, "none": 0, "b": 9}
        assert all(list(kept.read(name)) == list(PARTS[name]) for name in ("b", "a", "none", "b"))
    damaged = data.replace(b'"end": 7', b'"end": 8'), b"LLPREFX2" + data[8:], data[:9] + b"\xff" + data[10:]
    for content in (*(data[:length] for length in range(len(data))), data + b"x", *damaged):
        path.write_bytes(content)
        assert prefix_files.open_prefix(key) is None and not path.exists()
    (prefix_files.get_folder() / other).write_bytes(data)
    assert prefix_files.open_prefix(other) is None and not (prefix_files.get_folder() / other).exists()
    assert prefix_files.open_prefix(other) is None, "one that is not there"
    path.write_bytes(data[:-1] + b"x")
    with prefix_files.open_prefix(key) as kept:
        assert list(kept.read("a")) == list(PARTS["a"])
        with pytest.raises(ValueError, match=r"^b: damaged$"):
            kept.read("b")


def test_stored_prompts_are_listed_and_cleared(cache, monkeypatch):
    """Skip other files, and leave none open."""
    opened = []
    monkeypatch.setattr(prefix_files, "PrefixFile", lambda key, file: opened.append(file) or PrefixFile(key, file))
    assert prefix_files.list_entries() == [] and prefix_files.remove_all() == 0
    for number in range(3):
        prefix_files.write_prefix(f"{number:032x}", replace(ABOUT, end=number), PARTS)
        os.utime(prefix_files.get_folder() / f"{number:032x}", (number, number))
    for name in ("x", "0" * 31, "0" * 33, "g" * 32):
        (prefix_files.get_folder() / name).touch()
    sizes = [(prefix_files.get_folder() / f"{number:032x}").stat().st_size for number in range(3)]
    (prefix_files.get_folder() / f"{1:032x}").write_bytes(b"damaged")
    entries = sorted(prefix_files.list_entries(), key=lambda one: one.key)
    assert [(one.key, one.about.end, one.size, one.used) for one in entries] == [
        (f"{number:032x}", number, sizes[number], number) for number in (0, 2)
    ]
    assert len(opened) == 3 and all(file.closed for file in opened)
    assert prefix_files.remove_all() == sizes[0] + sizes[2] and len(list(prefix_files.get_folder().iterdir())) == 4


def test_old_temporary_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path)
    for name, age in ((".new.tmp", 0), (".old.tmp", prefix_files.DAY + 60), ("kept", 9 * prefix_files.DAY)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    prefix_files.remove_temporary(prefix_files.DAY)
    assert {path.name for path in tmp_path.iterdir()} == {".new.tmp", "kept"}
    assert prefix_files.remove_all() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}, "clear takes those that are young, too"


def test_files_that_cannot_be_removed_are_left(tmp_path, monkeypatch):
    """Ignore those that other programs hold open or have removed."""
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path)
    (tmp_path / ".folder.tmp").mkdir()
    for name in (".a.tmp", ".z.tmp", "kept"):
        (tmp_path / name).touch()
    prefix_files.remove_temporary(-60)
    prefix_files.remove_prefix(".folder.tmp")
    prefix_files.remove_prefix("gone")
    assert {path.name for path in tmp_path.iterdir()} == {".folder.tmp", "kept"}
    os.utime(tmp_path / "kept", (0, 0))
    prefix_files.mark_used(["gone", "kept"])
    assert (tmp_path / "kept").stat().st_mtime > time.time() - 60


@pytest.mark.parametrize(
    ("value", "limit"), [("2", 2 * 10**9), ("0", 0), ("-1", 0), ("x", None), ("", None), ("0.5", 5 * 10**8)]
)
def test_the_limit_of_stored_prompts_comes_from_the_environment(monkeypatch, value: str, limit: int | None):
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, value)
    usual = prefix_files.DEFAULT_LIMIT
    assert prefix_files.get_size_limit() == (usual if limit is None else limit)
    usage = SimpleNamespace(free=10**9)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert prefix_files.limit_by_disk(10**9) == min(5 * 10**8, prefix_files.get_size_limit()), (
        "a quarter of the disk, as the docs say"
    )


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_comparisons_have_ratios_and_errors():
    """Give the ratio of perplexities and the root mean square their own errors."""
    change, nll, base = np.array([0.3, -0.4, 0.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 4.0])
    known = Comparison(1, nll=nll, base_nll=base, kld=base, change=change, same_top=np.array([1.0, 0.0, 1.0]))
    root, error = known.rms_change
    assert root == pytest.approx(np.sqrt(0.25 / 3))
    assert error == pytest.approx(np.std([0.09, 0.16, 0], ddof=1) / np.sqrt(3) / (2 * root))
    assert known.ratio == pytest.approx((1.0, np.std(nll - base, ddof=1) / np.sqrt(3)))
    assert known.base_perplexity[0] == pytest.approx(np.exp(2)) and known.perplexity[0] == pytest.approx(np.exp(2))
    assert replace(known, change=np.zeros(3)).rms_change == (0.0, 0.0)
    facts = known.to_dict()
    assert (facts["chunks"], facts["tokens"], facts["same_top"]["mean"]) == (1, 3, pytest.approx(2 / 3))
    assert (facts["change"]["rms"], facts["change"]["rms_error"]) == (root, error)
    assert facts["change"]["maximum"] == 0.3 and facts["base"]["perplexity"] == known.base_perplexity[0]
    more = known.add_chunk(nll=nll, base_nll=base, kld=base, change=change, same_top=base)
    assert (more.chunks, list(more.nll)) == (2, [1, 2, 3, 1, 2, 3]) and Comparison().chunks == 0


def test_statistics_have_mean_error_and_percentiles():
    assert compute_mean_with_error(np.array([3.0])) == (3.0, 0.0)
    value, error = compute_mean_with_error(np.array([1.0, 2.0, 3.0, 6.0]))
    assert (value, error) == (3.0, pytest.approx(math.sqrt(3.5 / 3)))
    number, error = exponentiate(math.log(5), 0.1)
    assert (number, error) == (pytest.approx(5), pytest.approx(0.5))
    assert math.isfinite(exponentiate(1e9, 0.1)[0]) and exponentiate(-1e9, 0.1) == (0, 0)
    summary = compute_statistics(np.arange(101.0))
    assert (summary["minimum"], summary["maximum"], summary["50"], summary["mean"]) == (0, 100, 50, 50)


@pytest.mark.parametrize(
    ("text", "mark", "same"),
    [
        ("a<", "</x>", 1), ("a</", "</x>", 2), ("a</x", "</x>", 3), ("a</x>", "</x>", 0), ("</x", "</x>", 3),
        ("", "ab", 0),
        ("a", "a", 0), ("a", "abcdef", 1), ("aa", "aab", 2), ("aaa", "aab", 2), ("<a", "<b", 0),
    ],
)  # fmt: skip
def test_the_overlap_with_a_marker_is_its_longest_prefix(text: str, mark: str, same: int):
    assert count_overlap(text, mark) == same


def test_the_common_length_of_two_texts_is_counted():
    assert [receipts.count_common_prefix("abc", other) for other in ("abd", "abc", "", "xbc", "abcd")] == [
        2,
        3,
        0,
        0,
        3,
    ]


def test_the_processor_is_named_by_cpuinfo_or_its_machine(monkeypatch):
    cpuinfo = "processor\t: 0\nvendor_id\t: Other\nmodel name\t: Fast One\nmodel\t\t: 7\nmodel name\t: Fast Two\n"
    monkeypatch.setattr(cpu, "read_text", lambda path: cpuinfo)
    assert machine.describe_processor().startswith("Fast One (")
    monkeypatch.setattr(cpu, "read_text", lambda path: "")
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "riscv")
    assert machine.describe_processor().startswith("riscv (")


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [256, 512])
def test_a_run_ends_where_the_next_begins(later: int):
    runs = RunPlan(later)
    ends = [0]
    while ends[-1] < DEEP_POSITION + 4 * later:
        ends.append(runs.find_next_end(ends[-1]))
    assert {b - a for a, b in itertools.pairwise(ends) if a < DEEP_POSITION} == {FIRST_RUN}
    assert {b - a for a, b in itertools.pairwise(ends) if a >= DEEP_POSITION} == {later}
    for begin, end in itertools.pairwise(ends):
        for place in (begin, begin + 1, end - 1):
            assert (runs.find_last_end(place), runs.find_next_end(place)) == (begin, end)


# ---- a cache of pages -----------------------------------------------------------------------------------------------


def test_two_cache_pools_share_one_request():
    """Split retained memory between a CPU and a GPU pool, without a remainder."""
    from localllm.arch.layer_state import KVType, PagedState
    from localllm.engine.memory.cache import JointCache, KVCache

    parts = [KVCache([PagedState(layer, 1, dim, dim, window=window)], 128, KVType.parse("f32"), (1,))
             for layer, dim, window in ((0, 16, None), (1, 32, 40))]  # fmt: skip
    joint, pages = JointCache(*parts), np.array([2, 0])
    assert (joint.window, joint.bytes_per_token) == (40, 2 * 4 * 16 + 2 * 4 * 32)
    for local, nbytes in ((False, parts[0].get_page_bytes(False)), (True, parts[1].get_page_bytes(True))):
        content = np.random.default_rng(1).integers(1, 256, 2 * nbytes).astype(np.uint8)
        joint.fill(pages, local, content)
        np.testing.assert_array_equal(joint.copy_pages(pages, local), content)
        np.testing.assert_array_equal(parts[local].copy_pages(pages, local), content)
        for wrong in (content[:-1], np.append(content, 1).astype(np.uint8)):
            with pytest.raises(ValueError, match="bytes for"):
                joint.fill(pages, local, wrong)
    joint.copy(2, 1, 64)
    np.testing.assert_array_equal(joint.copy_pages(np.array([1]), False), joint.copy_pages(np.array([2]), False))


def test_a_cache_that_cannot_be_allocated_raises(monkeypatch):
    from localllm.arch.layer_state import KVType, PagedState
    from localllm.engine.memory import cache

    def refuse(self, size):
        raise MemoryLimitError("no")

    monkeypatch.setattr(cache.KVCache, "_reserve", refuse)
    with pytest.raises(MemoryLimitError):
        cache.KVCache([PagedState(0, 1, 16, 16)], 128, KVType.parse("f32"))


# ---- files of a split model, names, stretched contexts --------------------------------------------------------------


@pytest.mark.parametrize(("count", "stays"), [(1, True), (2, False), (3, False)])
def test_failed_splits_are_removed_but_a_single_file_stays(tmp_path, count: int, stays: bool):
    """Keep a single target, which may have existed before."""

    def finish_last() -> None:
        raise LocalllmError("the disk")

    files = [SimpleNamespace(path=str(tmp_path / f"{number}"), finish=lambda: None) for number in range(count)]
    files[-1].finish = finish_last
    for file in files:
        (tmp_path / file.path).write_text("x")
    with pytest.raises(LocalllmError):
        quantize.finish_files(files)
    assert [(tmp_path / file.path).exists() for file in files] == [stays] * count


def test_accepted_options_of_llama_cpp_have_no_refusal():
    assert llama_names.explain_unsupported("--nothing-of-the-kind") == ""
    for name, reason in llama_names._REFUSED.items():
        assert llama_names.explain_unsupported(name) == reason != ""


@pytest.mark.parametrize(
    ("config_fields", "magnitude"),
    [
        ({}, None),
        ({"mscale": 0.7}, None),  # one alone means nothing
        ({"mscale_all_dim": 0.7}, None),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.7}, 1.5),
    ],
)
def test_yarn_magnitudes_are_converted_to_attn_factor(tmp_path, config_fields, magnitude):
    """Divide by 1 + 0.1 ln(factor), which readers of GGUF multiply themselves."""
    converted = rope_scaling.read_yarn(
        CheckpointConfig({"factor": 4.0, **config_fields}, tmp_path / "config.json"), 512
    )
    rest = converted.get("scaling.attn_factor")
    assert rest == (None if magnitude is None else pytest.approx(magnitude / (1 + 0.1 * math.log(4))))
    assert (converted["scaling.factor"], converted["scaling.original_context_length"]) == (4.0, 512)


def test_other_words_suggest_a_command():
    for name, words in compat.SYNONYMS.items():
        for word in words.split():
            assert compat.suggest_command(word) == compat.suggest_command(word.upper()) == name
    assert [compat.suggest_command(word) for word in ("", "nothing", "remov", "remove delete")] == [""] * 4


def test_every_warning_is_one_line(capsys):
    opening.warn(["one", "two\nlines"])
    assert capsys.readouterr().err == "localllm: warning: one\nlocalllm: warning: two lines\n"
    opening.warn([])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wrong", [{"ssm.time_step_rank": 7}, {"ssm.group_count": 3}, {"ssm.inner_size": 66}], ids=str)
def test_heads_and_groups_of_mamba_2_must_divide_the_width(wrong):
    """Use 64 columns in 8 heads of 4 groups."""
    metadata = {"ssm.inner_size": 64, "ssm.time_step_rank": 8, "ssm.group_count": 4, "ssm.state_size": 5}
    metadata |= {"ssm.conv_kernel": 4}
    named = {f"mamba2.{name}": value for name, value in (metadata | wrong).items()}
    fields = HyperparameterReader({"general.architecture": "mamba2", **named}, "model.gguf", 100)
    with pytest.raises(ModelError):
        mamba2.read_mamba2_sizes(fields)
    right = HyperparameterReader(
        {**fields.metadata, **{f"mamba2.{name}": value for name, value in metadata.items()}}, "m", 100
    )
    assert mamba2.read_mamba2_sizes(right).inner == 64


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "on"), (False, "off"), (0, "0"), (1.5, "1.5"), (["a", 1], "a, 1"), ((), ""), ("two\nlines", "two lines")],
)
def test_values_are_printed_as_config_does(value, text: str):
    assert config.format_value(value) == text
