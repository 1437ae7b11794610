"""Test small helpers of the commands: vectors, endpoints, map, and the cache."""

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch.families.apertus import read_per_layer
from localllm.cli import map_run as map_command
from localllm.cli.commands import embed, inspect
from localllm.cli.commands import pull as pull_command
from localllm.cli.commands.embed import open_output
from localllm.cli.options import one_shot
from localllm.cli.options import shared as options
from localllm.cli.options.shared import RopeFlags
from localllm.cli.parameters import parse_size
from localllm.cli.terminal import stream_renderer as drawing
from localllm.convert.config import CheckpointConfig
from localllm.convert.projectors.internvl import read_side
from localllm.errors import LocalllmError, ModelError, RecordsError, UsageError
from localllm.files.gguf.metadata_reader import MetadataReader
from localllm.services.records.lines import Record


def test_pull_leaves_local_files_and_the_built_in_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(b"")
    assert pull_command.pull_file(f"{tmp_path}/m.gguf") == f"{tmp_path}/m.gguf"
    with pytest.raises(UsageError, match="is the built-in model; there is nothing to download"):
        pull_command.pull_file("guide")
    with pytest.raises(ModelError, match="no such file"):
        pull_command.pull_file(f"{tmp_path}/none.gguf")
    monkeypatch.setattr(pull_command, "pull_with_progress", lambda reference: reference.repository)
    assert pull_command.pull_file("hf:a/b") == "a/b"


@pytest.mark.parametrize(("character", "wide"), [
    ("a", False), ("é", False), ("狐", True), ("→", True), ("\u2190", True), ("\u218f", False), ("\u2bff", True),
    ("\u2c00", False),
    ("\ufe0f", True), ("\ufe0e", False), ("가", True), ("…", False),
])  # fmt: skip
def test_wide_characters_are_recognized(character: str, wide: bool):
    assert drawing.is_wide(character) == wide


def test_a_line_may_break_after_wide_characters():
    assert (
        drawing.can_break_before("狐", "a")
        and drawing.can_break_before("a", "狐")
        and not drawing.can_break_before("a", "b")
    )
    assert not drawing.can_break_before("狐", "。") and drawing.can_break_before("a", "🇩🇪")


def test_image_sizes_of_a_config_must_be_positive_integers():
    def side(value: Any) -> int:
        return read_side(CheckpointConfig({"image_size": value}, Path("config.json")), "image_size")

    assert side(448) == side([448, 448]) == 448
    for odd in ([448], [448, 224], [448, 448, 448], [], None, "448", ["448", "448"]):
        with pytest.raises(ModelError, match="image_size"):
            side(odd)


def test_a_config_value_may_be_a_number_or_one_for_each_layer():
    def read(value: Any) -> list[float]:
        return read_per_layer(MetadataReader({"xielu.beta": value}, "xielu.", "m"), "beta", 2).tolist()

    assert read(0.5) == [0.5, 0.5] and read(np.array([1e4, -1e4])) == [1e4, -1e4]
    for odd in (1, np.array([1, 2]), np.array([1.0]), np.array([1.0, 1.1e4]), np.array([1.0, np.nan]), -1.1e4, None):
        with pytest.raises(ModelError, match="beta must be 2 numbers from -10000 to 10000"):
            read(odd)


def vectors_of(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(-1, 2)


def test_vectors_are_printed_as_json_lines_or_plain_text(capsysbinary: pytest.CaptureFixture[bytes]):
    records = [Record(1, "a"), Record("ü", "b")]
    lines = embed.VectorLines(None, plain=False)
    lines.put(records, vectors_of(0.1, -2.0, 1 / 3, 1e-20))
    lines.fail(Record("ü", ""), UsageError("no text"))
    out = capsysbinary.readouterr().out.decode().splitlines()
    assert out[0] == '{"id": 1, "embedding": [0.100000001, -2]}' and out[2] == '{"id": "ü", "error": "no text"}'
    assert out[1] == '{"id": "ü", "embedding": [0.333333343, 9.99999968e-21]}'
    plain = embed.VectorLines(None, plain=True)
    plain.put(records, vectors_of(0.1, -2.0, 3.0, 4.0))
    assert capsysbinary.readouterr().out == b"0.100000001 -2\n3 4\n"
    with pytest.raises(UsageError, match=r"^no text; the plain format cannot store errors: use --format jsonl$"):
        plain.fail(records[0], UsageError("no text"))
    rows = embed.VectorArray()
    assert rows.find_remaining(records) is records
    with pytest.raises(UsageError, match=r"^no text; an .npy file cannot store errors: use --format jsonl$"):
        rows.fail(records[0], UsageError("no text"))


def test_embed_keeps_the_vectors_of_an_existing_output(tmp_path: Path):
    """Retry errors, and refuse an output of another input."""
    path, model = tmp_path / "v.jsonl", str(tmp_path / "m.gguf")
    records = [Record(1, "a"), Record(2, "b"), Record(3, "", "broken"), Record(4, "d")]
    with open_output("jsonl", str(path), model, records) as out:
        assert out.find_remaining(records) == records
        out.put(records[:1], vectors_of(1, 2))
        out.fail(records[1], UsageError("no"))
        out.put(records[2:3], vectors_of(3, 4))
    with open_output("jsonl", str(path), model, records) as out:
        assert out.find_remaining(records) == records[1:]
    problem = r"v\.jsonl: record 1 of this file is not in the input; give another output file"
    with pytest.raises(UsageError, match=problem), open_output("jsonl", str(path), model, records[1:]):
        pass


@pytest.mark.parametrize("kind", ["plain", "npy"])
def test_a_vector_file_appears_when_it_is_complete(tmp_path: Path, kind: str):
    """Never replace the model."""
    path, model = str(tmp_path / "v"), str(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"model")
    with open_output(kind, path, model, []) as out:
        out.put([Record(1, "a")], vectors_of(1, 2))
        out.put([Record(2, "b")], vectors_of(3, 4))
        assert not os.path.exists(path)
    loaded = np.loadtxt(path) if kind == "plain" else np.load(path)
    assert loaded.tolist() == [[1, 2], [3, 4]] and (kind == "plain" or loaded.dtype == np.float32)
    with pytest.raises(LocalllmError), open_output(kind, model, model, []) as out:
        out.put([Record(1, "a")], vectors_of(1, 2))
    assert (tmp_path / "m.gguf").read_bytes() == b"model"


def test_an_array_goes_to_a_pipe_but_not_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
):
    with open_output("npy", None, "m", []):
        pass
    assert np.load(io.BytesIO(capsysbinary.readouterr().out)).shape == (0, 0)
    monkeypatch.setattr(embed, "is_terminal", lambda stream: True)
    problem = r"a NumPy file cannot be printed to a terminal"
    with pytest.raises(UsageError, match=problem), open_output("npy", None, "m", []):
        pass


@pytest.mark.parametrize(("format", "output", "kind"), [
    (None, "v.npy", "npy"), ("plain", "v.npy", "plain"), (None, "v", "jsonl"), (None, None, "jsonl"),
])  # fmt: skip
def test_the_vector_format_follows_the_output_name(format: str | None, output: str | None, kind: str):
    assert embed.choose_format(format, output) == kind


def test_embed_reads_lines_files_images_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Take INPUT as a text if there are images."""
    (tmp_path / "lines").write_text("a\n")
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "c.txt").write_bytes(b"\xff\xff\0")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\n")))

    def ids(*arguments: Any) -> list[tuple[Any, bool]]:
        return [(record.id, bool(record.error)) for record in embed.read_inputs(*arguments)]

    lines, picture = str(tmp_path / "lines"), "x.png"
    assert ids(lines, None) == [(1, False)] and ids(lines, None, [picture]) == [(1, False), (picture, False)]
    assert ids("a cat", None, [picture]) == [("a cat", False), (picture, False)]
    assert ids(None, None, [picture]) == [(picture, False)] and ids(None, None) == [(1, False)]
    both = [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")]
    assert ids(None, both, [picture]) == [(picture, False), (both[0], False), (both[1], True)]


@pytest.mark.parametrize(("text", "number"), [
    ("500M", 500_000_000), ("8g", 8 * 10**9), (" 1.5k ", 1500), ("12", 12), ("7B", 7), ("2kb", 2000), ("0.0015K", 1),
])  # fmt: skip
def test_amounts_are_parsed_with_units(text: str, number: int):
    assert parse_size(text) == number
    for odd in ("", "M", "1.M", "-1", "1T", "1 M", f"{text}x"):
        with pytest.raises(ValueError, match="must be a size in bytes, such as 500M or 8G, not"):
            parse_size(odd)


@pytest.mark.parametrize(("more", "left"), [
    ({}, []), ({"context": 5}, ["-c"]), ({"threads": 5}, ["-t"]), ({"device": "cpu"}, ["--device"]),
    ({"gpu_layers": "0"}, ["-ngl"]), ({"cache": options.CacheFlags(keys="f32")}, ["--kv-type"]),
    ({"context": 5, "threads": 1, "cache": options.CacheFlags(kv_type="q8_0")}, ["-c", "-t", "--kv-type"]),
    ({"adapters": options.AdapterFlags(lora=[[("a.gguf", 1.0)]])}, ["--lora"]),
])  # fmt: skip
def test_engine_options_are_ignored_with_an_endpoint(more: dict[str, Any], left: list[str]):
    usual = {"cache": options.CacheFlags(), "rope": RopeFlags(), "adapters": options.AdapterFlags()}
    assert one_shot.list_weight_options(options.EngineFlags(**{**usual, **more})) == left


def test_an_endpoint_takes_its_key_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCALLLM_API_KEY", raising=False)
    (tmp_path / "key").write_text(" k \n")
    (tmp_path / "none").write_text(" \n")
    group = one_shot.EndpointFlags
    assert group().parse_endpoint() is None and one_shot.read_api_key(None) is None
    assert group(endpoint="http://x", api_key_file=str(tmp_path / "key")).parse_endpoint().key == "k"
    with pytest.raises(UsageError, match="api_key_file is for the server of --endpoint: add --endpoint URL"):
        group(api_key_file=str(tmp_path / "key")).parse_endpoint()
    with pytest.raises(UsageError, match="none must have at least one key, one per line"):
        group(endpoint="http://x", api_key_file=str(tmp_path / "none")).parse_endpoint()
    for variable, known in (("k", "k"), ("", None)):
        monkeypatch.setenv("LOCALLLM_API_KEY", variable)
        assert one_shot.read_api_key(None) == known
    with pytest.raises(UsageError, match="fast is not available with --endpoint: set it when you start the server"):
        one_shot.open_remote(None, None, None, ray=False, fast=True)


@pytest.mark.parametrize(("layers", "used", "description"), [
    (0, True, ""), (1, True, "1 layer, 5 B, used"), (1, False, "1 layer, 5 B, not used"),
    (2, True, "2 layers, 5 B, one is used"), (2, False, "2 layers, 5 B, not used"),
])  # fmt: skip
def test_inspect_describes_mtp_layers(layers: int, used: bool, description: str):
    assert inspect.format_mtp({"layers": layers, "bytes": 5, "used": used}) == description


def test_inspect_describes_the_vision_encoder():
    eye = {"side": 224, "patch": 14, "width": 512, "type": "clip"}
    description = "clip: pictures of 224 x 224 in patches of 14, vectors of 512 elements"
    assert inspect.format_vision(eye, None) == description
    description = "mlp: pictures of 224 x 224 in patches of 14, for models 512 wide"
    assert inspect.format_vision(eye | {"type": "mlp"}, None) == description
    assert inspect.format_vision(None, {"path": "p", "bytes": 7}) == "images, by p (7 B)"
    assert inspect.format_vision(None, None) == ""
    assert inspect.format_recommended(("top_k", "min_p")) == "top_k;min_p" and inspect.format_recommended(0.5) == "0.5"


FACTS = {
    "vocabulary": {"size": 9, "kind": "gpt2"}, "supported": True, "chat_template": None, "layers": 2, "width": None,
    "heads": 4, "kv_heads": None, "path": "/m.gguf", "name": "", "architecture": "llama", "reason": "odd",
    "parameters": 1500, "tensors": [1, 2], "weight_bytes": 3000, "bits_per_weight": 4.504, "made_with": "a\n b",
    "context": 0, "reads": "", "guessing": {"layers": 0, "bytes": 0, "used": False}, "sees": None, "projector": None,
    "adapter": None, "sampling": {"top_k": 5, "samplers": ("a", "b")},
}  # fmt: skip


def test_inspect_prints_the_facts_of_a_file():
    """Leave out what is unknown."""
    lines = {line[:14].strip(): line[14:] for line in inspect.format_summary(FACTS)}
    assert lines == {
        "file": "/m.gguf", "architecture": "llama", "parameters": "1.5 k in 2 tensors",
        "weights": "3.0 kB, 4.50 bits per weight", "made with": "a b", "shape": "2 layers, 4 heads",
        "vocabulary": "9 tokens, gpt2", "chat template": "no", "sampling": "top_k 5, samplers a;b",
    }  # fmt: skip
    other = FACTS | {"supported": False, "context": 7, "chat_template": "x", "name": "n", "reads": "text"}
    lines = {line[:14].strip(): line[14:] for line in inspect.format_summary(other)}
    assert lines["architecture"] == "llama (not usable: odd)" and lines["context"] == "7 tokens"
    assert (lines["name"], lines["chat template"], lines["makes"]) == ("n", "yes", "text")
    eye = {"side": 2, "patch": 1, "width": 5, "type": "clip"}
    assert "chat template" not in {line[:14].strip() for line in inspect.format_summary(FACTS | {"sees": eye})}


def test_inspect_prints_what_an_adapter_changes():
    lora = {
        "type": "lora", "architecture": "llama", "ranks": [4, 16], "alpha": 32.0, "invocation_tokens": [7, 8],
        "matrices": {"attn_q": 2, "ffn_up": 1}, "memory_bytes": 5,
    }  # fmt: skip
    lines = [line for line in inspect.format_summary(FACTS | {"adapter": lora}) if line[:7] in RIGHT_OF_ADAPTER]
    assert lines == [
        "adapter       LoRA for llama models", "rank          4 to 16, alpha 32",
        "changes       3 matrices: 2 attn_q, 1 ffn_up", "active        from the tokens 7 8 on",
    ]  # fmt: skip
    vector = {"type": "control vector", "architecture": "", "layers": [1, 2, 5], "widths": [64]}
    lines = inspect.format_summary(FACTS | {"adapter": vector})
    assert [line for line in lines if line[:7] in RIGHT_OF_ADAPTER] == [
        "adapter       control vector", "changes       the outputs of 3 layers, 1 to 5, 64 wide",
    ]  # fmt: skip
    assert not [line for line in lines if line.startswith(("architecture", "chat template"))]


RIGHT_OF_ADAPTER = "adapter", "rank   ", "changes", "active "


def test_map_prints_its_progress_and_totals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    shown: list[str] = []
    now = [100.0]
    line = SimpleNamespace(show=shown.append, clear=lambda: shown.append(""))
    monkeypatch.setattr(map_command, "ProgressLine", lambda: line)
    monkeypatch.setattr(map_command, "perf_counter", lambda: now[0])
    monkeypatch.setattr(map_command, "say_dim", lambda text: shown.append(f"dim {text}"))
    progress = map_command.MapProgress([Record(number, "") for number in range(5)], 3)
    now[0] = 110.0
    with progress:  # from which on time counts
        now[0] = 112.0
        progress.show(SimpleNamespace(written=30, done=0))
        progress.count({"id": 1})
        progress.count({"id": 2, "error": "no"})
        progress.show(SimpleNamespace(written=50, done=2))
    expected = ["3 of 8 answered, 15.0 tokens/s", "", "", "5 of 8 answered, 25.0 tokens/s, 3 s left", ""]
    assert shown == expected
    with pytest.raises(KeyboardInterrupt):
        progress.end(False)
    assert shown[5:] == ["dim 2 records in 2 s, 25.0 tokens/s, 1 failed"]
    for _ in range(3):
        progress.count({"id": 3})
    with pytest.raises(RecordsError, match=r"^1 of 5 records failed; see the error field of their output lines$"):
        progress.end(True)
    totals = "5 records in 2 s, 50 tokens written, 25.0 tokens/s, 1 failed"
    assert capsys.readouterr().err == f"{totals}\n"
    progress._failed = 0
    progress.end(False)


def test_cache_lists_prompts_and_texts_with_their_sizes(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
):
    """Count a shared prefix once, for the latest prompt; the total includes all."""
    from localllm.cli.commands import cache
    from localllm.files.cache import ngram_cache_file as written_file
    from localllm.files.cache import prefix_files

    messages: list[str] = []
    monkeypatch.setattr(cache, "say_dim", messages.append)
    monkeypatch.setattr(cache, "format_time", lambda seconds: f"at {seconds}")
    monkeypatch.setattr(prefix_files, "remove_all", lambda: 1500)
    monkeypatch.setattr(written_file, "remove_all", lambda: 500)
    entries, texts = list[Any](), list[Any]()
    monkeypatch.setattr(prefix_files, "list_entries", lambda: entries)
    monkeypatch.setattr(written_file, "list_files", lambda: texts)
    cache.cache()
    cache.cache("clear")
    assert messages == ["the cache is empty", "2.0 kB removed"] and capsysbinary.readouterr().out == b""
    texts.append((77, 8, 4))
    cache.cache()
    assert [line.split() for line in capsysbinary.readouterr().out.decode().splitlines()][1:] == [
        ["texts", "77", "8", "B", "at", "4"], ["all", "8", "B"],
    ]  # fmt: skip
    for key, before, size, used, end in (("a", "", 100, 1, 64), ("b", "a", 20, 2, 96), ("c", "a", 3, 9, 80)):
        about = SimpleNamespace(before=before, model=f"m\n{key}", end=end)
        entries.append(SimpleNamespace(key=key, about=about, size=size, used=used))
    cache.cache()
    assert [line.split() for line in capsysbinary.readouterr().out.decode().splitlines()][1:] == [
        ["m", "c", "80", "103", "B", "at", "9"], ["m", "b", "96", "20", "B", "at", "2"],
        ["texts", "77", "8", "B", "at", "4"], ["all", "131", "B"],
    ]  # fmt: skip
