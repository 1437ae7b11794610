"""Test options of quantize that match nothing, dry runs, checkpoints in several files, and other folders."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint import spelled_out, write_checkpoint, write_family, write_json
from project import GOLDENS
from tiny_model import write_tiny_model

from localllm.cli.terminal import quantize_progress
from localllm.convert.folder import split_names
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import pack_value
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations, write_imatrix
from localllm.kernels.reference import dequantize
from localllm.quant.encode import encode
from localllm.quantizing.quantize import parse_patterns, split_patterns


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


# ---- options that match nothing


@pytest.mark.parametrize(("option", "value", "idle"), [
    ("--tensor-type", "ATTN_VV=q8_0", True), ("--tensor-type", "attn_v=q8_0", False),
    ("--tensor-type", "ATTN_V=q8_0", False),
    ("--tensor-type", "_norm=q8_0", True),  # which nothing quantizes
    ("--tensor-type", "attn_v=q8_0,ffn=q4_0", False), ("--tensor-type", "attn_v=q8_0,fnn=q4_0", True),
])  # fmt: skip
def test_a_tensor_type_that_matches_nothing_warns_or_fails_with_strict(
    model: Path, cli, option: str, value: str, idle: bool
):
    out = model.with_name("out.gguf")
    code, _, err = cli("quantize", model, out, "Q8_0", option, value)
    named = value.rsplit(",", maxsplit=1)[-1].rpartition("=")[0]
    assert code == 0 and (f"localllm: warning: {option} {named}=" in err and "matches no tensor" in err) is idle
    out.unlink()
    code, _, err = cli("quantize", model, out, "Q8_0", option, value, "--strict")
    assert code == (2 if idle else 0) and (f"--strict: {option} {named}=" in err) is idle
    assert out.exists() is not idle


def test_several_tensor_types_may_be_one_argument(model: Path, cli):
    out = model.with_name("out.gguf")
    assert cli("quantize", model, out, "Q4_0", "--tensor-type", "attn_v=q8_0,ffn=q5_0")[0] == 0
    formats = {name: tensor.format.name for name, tensor in GGUFFile.open(out).tensors.items()}
    assert formats["blk.0.attn_v.weight"] == "Q8_0" and formats["blk.1.ffn_up.weight"] == "Q5_0"
    assert formats["blk.0.attn_q.weight"] == "Q4_0"


def test_commas_within_an_expression_are_kept():
    assert split_patterns(r"blk\.[0-9]{1,2}\.attn_v=q8_0") == [r"blk\.[0-9]{1,2}\.attn_v=q8_0"]
    assert [format for _, format in parse_patterns(["a=q8_0,b=F16", "c=q4_0"])] == ["Q8_0", "F16", "Q4_0"]
    for text in ("a=q8_0,b", "a=q8_0,b=zz"):
        with pytest.raises(UsageError, match="must be a tensor format"):
            parse_patterns([text])


def test_a_tensor_type_where_nothing_is_quantized_warns(model: Path, cli):
    code, _, err = cli("quantize", model, model.with_name("o.gguf"), "F16", "--tensor-type", "attn_v=q8_0")
    assert code == 0 and "--tensor-type attn_v=Q8_0 matches no tensor that is quantized" in err


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_an_included_or_excluded_weight_that_matches_nothing_warns(model: Path, cli, option: str):
    names = [name for name in GGUFFile.open(model).tensors if "norm" not in name]
    shapes = {name: GGUFFile.open(model).tensors[name].shape for name in names}
    squares = {
        name: SquaredActivations(np.ones((1, shapes[name][-1]), np.float32), np.ones(1, np.float32)) for name in names
    }
    path = model.with_name("m.imatrix")
    write_imatrix(str(path), ImportanceMatrix(squares, ["text"], 1, 512))
    words = ["--imatrix", path, f"--{option}-weights", "attn_v", f"--{option}-weights", "atn_q"]
    code, _, err = cli("quantize", model, model.with_name("o.gguf"), "Q8_0", *words)
    assert code == 0 and f"--{option}-weights atn_q matches no tensor" in err and "weights attn_v matches" not in err
    code, _, err = cli("quantize", model, model.with_name("p.gguf"), "Q8_0", *words, "--strict")
    assert code == 2 and f"--strict: --{option}-weights atn_q matches no tensor" in err


# ---- dry runs


def test_a_dry_run_refuses_what_the_run_refuses(model: Path, cli, monkeypatch):
    """Expect the same exit code and message, and no file."""
    link, folder = model.with_name("link.gguf"), model.parent / "nowhere"
    os.symlink(model, link)
    (model.with_name("notes.gguf")).write_text("mine")
    small = model.with_name("small.gguf")
    assert cli("quantize", model, small, "Q4_0")[0] == 0
    for words in ([model, model, "Q8_0"], [model, link, "Q8_0"], [model, folder / "x.gguf", "Q8_0"],
                  [model, model.with_name("notes.gguf"), "Q8_0"], [model, model.parent, "Q8_0"],
                  [small, model.with_name("x.gguf"), "F32", "--allow-requantize"]):  # fmt: skip
        before = sorted(path.name for path in model.parent.iterdir())
        dry, real = (cli("quantize", *words, *more) for more in (["--dry-run"], []))
        assert dry[0] == real[0] == 2 and dry[2] == real[2] and dry[1] == "", words
        assert sorted(path.name for path in model.parent.iterdir()) == before


def test_a_dry_run_fails_on_a_full_disk(model: Path, tmp_path: Path, monkeypatch, capsys):
    from invoked import invoke

    from localllm.errors import LocalllmError

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(LocalllmError, match="bytes needed, but only 10 free"):
        invoke("quantize", model, tmp_path / "o.gguf", "Q8_0", "--dry-run")


# ---- checkpoints


@pytest.mark.parametrize("files", [2, 3, 5])
def test_keep_split_writes_a_checkpoint_as_several_files(tmp_path: Path, cli, files: int):
    folder = write_checkpoint(tmp_path / "model", files=files)
    code, out, err = cli("quantize", folder, tmp_path / "out.gguf", "Q8_0", "--keep-split")
    assert code == 0, err
    paths = [tmp_path / f"out-{number + 1:05d}-of-{files:05d}.gguf" for number in range(files)]
    assert [path for path in paths if path.exists()] == paths and f"and {files - 1} more" in out
    whole = GGUFFile.open(paths[0])
    assert cli("quantize", folder, tmp_path / "one.gguf", "Q8_0")[0] == 0
    one = GGUFFile.open(tmp_path / "one.gguf")
    assert whole.tensors.keys() == one.tensors.keys() and len(whole.parts) == files
    assert all(np.array_equal(whole.tensors[name].data, one.tensors[name].data) for name in one.tensors)
    assert cli("run", paths[0], "-p", "Hi", "-n", "1")[0] == 0


def test_tensors_are_divided_into_splits_of_similar_size():
    assert split_names({"a": 1, "b": 1, "c": 1, "d": 1}, 2) == [["a", "b"], ["c", "d"]]
    assert split_names({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert split_names({"a": 1, "b": 1, "c": 100}, 3) == [["a"], ["b"], ["c"]]
    assert split_names({"a": 1}, 4) == [["a"]]
    for count in range(1, 12):
        parts = split_names({f"blk.{number}.x": 1 + number % 7 for number in range(11)}, count)
        assert len(parts) == count and all(parts) and sum(map(len, parts)) == 11


@pytest.mark.parametrize(("config", "expected"), [
    ({"peft_type": "LORA", "base_model_name_or_path": "o/base"},
     "is a LoRA adapter, not a model: merge it into its base model, o/base, first"),
    ({}, "is a LoRA adapter, not a model: merge it into its base model first"),
    ({"peft_type": "IA3"}, "is an adapter (IA3), not a model"),
])  # fmt: skip
def test_refusing_an_adapter_names_its_base_model(tmp_path: Path, cli, config: dict, expected: str):
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_json(folder / "adapter_config.json", config)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    code, _, err = cli("quantize", folder, tmp_path / "x.gguf", "Q8_0")
    assert code == 3 and expected in err and err.count("\n") == 1


def test_templates_that_do_not_compile_are_written_with_a_warning_each(tmp_path: Path, cli):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message }")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("{{ x")
    (folder / "additional_chat_templates/good.jinja").write_text("{{ messages[0].content }}")
    code, _, err = cli("quantize", folder, tmp_path / "x.gguf", "F32")
    lines = [line for line in err.splitlines() if "the chat template is invalid" in line]
    assert (
        code == 0
        and len(lines) == 2
        and "it is written unchanged" in err
        and "(rag)" in lines[1]
        and "(rag)" not in lines[0]
    )
    assert GGUFFile.open(tmp_path / "x.gguf").metadata["tokenizer.chat_template"].startswith("{% for")


def test_a_source_that_changes_while_it_is_read_is_refused(model: Path, tmp_path: Path):
    """Write nothing, whatever the command, and keep an older output."""
    from localllm.quantizing.plan import QuantizeRequest, make_plan
    from localllm.quantizing.quantize import find_type, open_source, quantize_model
    from localllm.quantizing.rewrite import plan_split, write_files
    from localllm.quantizing.splitting import SplitLimits

    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    folder = write_checkpoint(tmp_path / "folder")
    for source, changed in ((model, model), (folder, folder / "config.json"), (folder, folder / "model.safetensors")):
        plan = make_plan(open_source(str(source)), QuantizeRequest(find_type("Q8_0")))

        def touch(done: int, name: str, changed: Path = changed) -> None:
            os.utime(changed, ns=(1, done))

        with pytest.raises(ModelError, match=f"{changed.name}: this file changed while it was read"):
            quantize_model(plan, str(out), QuantizeRequest(find_type("Q8_0")), 1, touch)
        assert out.read_bytes() == b"old"
    file = GGUFFile.open(model)
    files, _ = plan_split(file, str(tmp_path / "s"), SplitLimits(5))
    with pytest.raises(ModelError, match="changed while it was read"):
        write_files(file, files, lambda done, name: os.utime(model, ns=(7, done)))
    assert not list(tmp_path.glob("s-*"))


# ---- layers that are left out, formats from a file


def test_pruning_layers_renumbers_the_others(model: Path, cli):
    """Write the layer count as llama-quantize does, at the same position."""
    out = model.with_name("out.gguf")
    assert cli("quantize", model, out, "COPY", "--prune-layers", "0")[0] == 0
    before, after = GGUFFile.open(model), GGUFFile.open(out)
    assert after.metadata["llama.block_count"] == 1 and list(after.packed)[-1] == "llama.block_count"
    assert {name for name in after.tensors if name.startswith("blk.")} == {
        name for name in before.tensors if name.startswith("blk.0.")}  # fmt: skip
    for name, tensor in after.tensors.items():
        assert np.array_equal(tensor.data, before.tensors[name.replace("blk.0.", "blk.1.")].data)
    assert cli("run", out, "-p", "Hi", "-n", "1")[0] == 0
    for words, message in (
        ("2", "layer 2 does not exist"),
        ("0,1", "at least one layer must remain"),
        ("x", "must be layer indices"),
        ("", "must be layer indices"),
    ):
        code, _, err = cli("quantize", model, out, "COPY", "--prune-layers", words)
        assert code == 2 and message in err and err.count("\n") == 1


def test_pruned_layers_keep_their_own_importance(model: Path, cli):
    squares = {f"blk.{n}.attn_q.weight": SquaredActivations(np.full((1, 64), 1 + 9 * n, np.float32), np.ones(1,
    np.float32))
               for n in (0, 1)}  # fmt: skip
    squares["blk.1.attn_q.weight"].sums[0, :32] = 1e-3
    path = model.with_name("m.imatrix")
    write_imatrix(str(path), ImportanceMatrix(squares, ["text"], 1, 512))
    whole, pruned = model.with_name("whole.gguf"), model.with_name("pruned.gguf")
    assert cli("quantize", model, whole, "Q4_0", "--imatrix", path)[0] == 0
    assert cli("quantize", model, pruned, "Q4_0", "--imatrix", path, "--prune-layers", "0")[0] == 0
    ours, theirs = (GGUFFile.open(each).tensors for each in (pruned, whole))
    assert np.array_equal(ours["blk.0.attn_q.weight"].data, theirs["blk.1.attn_q.weight"].data)


def test_values_by_layer_are_pruned_with_the_layers(tmp_path: Path):
    from localllm.quantizing.sources import PrunedSource

    names = ["blk.0.x", "blk.1.x", "blk.2.x", "y"]
    metadata = {"general.architecture": "a", "a.block_count": 3, "a.head_count": [1, 2, 3], "a.other": [1, 2],
                "b.names": [1, 2, 3]}  # fmt: skip
    source = SimpleNamespace(path="m", files=(), warnings=(), ignored=(), parts=[names], metadata=metadata)
    source.packed = {key: pack_value(value) for key, value in metadata.items()}
    source.tensors = [SimpleNamespace(name=name, format=None, shape=(1,)) for name in names]
    pruned = PrunedSource(source, (1,))
    assert [tensor.name for tensor in pruned.tensors] == ["blk.0.x", "blk.1.x", "y"] == pruned.parts[0]
    assert pruned.metadata["a.head_count"] == [1, 3] and pruned.packed["a.head_count"] == pack_value([1, 3])
    assert pruned.metadata["a.other"] == [1, 2] and pruned.metadata["b.names"] == [1, 2, 3]


def test_tensor_types_are_read_from_a_file_and_overridden_by_options(model: Path, cli):
    file, out = model.with_name("types.txt"), model.with_name("out.gguf")
    file.write_text("attn_v=q8_0\nffn_up=f16 ATTN_Q=q5_0\n")
    assert cli("quantize", model, out, "Q4_0", "--tensor-type-file", file, "--tensor-type", "attn_q=Q5_1")[0] == 0
    tensors = GGUFFile.open(out).tensors
    expected = {"attn_v": "Q8_0", "ffn_up": "F16", "attn_q": "Q5_1", "attn_k": "Q4_0"}
    assert {name: tensors[f"blk.1.{name}.weight"].format.name for name in expected} == expected


def test_invalid_files_of_tensor_types_are_refused(model: Path, cli):
    file, out = model.with_name("types.txt"), model.with_name("out.gguf")
    file.write_text("attn_q=q8_0 attn_v")
    code, _, err = cli("quantize", model, out, "Q4_0", "--tensor-type-file", file)
    assert code == 2 and f"{file}: attn_v: expected REGEX=FORMAT" in err
    assert cli("quantize", model, out, "Q4_0", "--tensor-type-file", model.with_name("none"))[0] == 2


# ---- progress and times


def test_without_a_terminal_progress_is_printed_as_lines(model: Path, cli, monkeypatch):
    monkeypatch.setattr(quantize_progress, "EVERY", 0.0)
    code, _, err = cli("quantize", model, model.with_name("o.gguf"), "Q8_0")
    lines = [line for line in err.splitlines() if " s left: " in line]
    assert code == 0 and len(lines) > 10
    assert re.fullmatch(r"localllm: \d+ %, about \d+ s left: encoding [a-z0-9_.]+\.weight", lines[1])
    monkeypatch.setattr(quantize_progress, "EVERY", 1000.0)
    assert "left" not in cli("quantize", model, model.with_name("o.gguf"), "Q8_0")[2]


@pytest.mark.sampled
def test_the_total_time_is_printed_with_its_parts(model: Path, cli, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 400)
    words = ["quantize", model, tmp_path / "o.gguf", "Q4_0", "--calibrate", text, "--size", "own"]
    code, out, _ = cli(*words)
    match = re.search(r", (\d+\.\d) s \(scales (\d+\.\d), choosing formats (\d+\.\d), encoding (\d+\.\d)\)\n$", out)
    assert code == 0 and match
    total, *parts = map(float, match.groups())
    assert abs(total - sum(parts)) < 0.5
    assert re.search(r", \d+\.\d s\n$", cli("quantize", model, tmp_path / "p.gguf", "Q4_0")[1])


def test_embeddings_that_make_no_logits_are_quantized_without_importance(tmp_path: Path, cli):
    """Rows of an embedding model are looked up: the same error counts in each column."""
    facts = json.loads((GOLDENS / "checkpoints.json").read_text())["gemma-embedding"]
    folder = write_family(tmp_path / "model", facts["config"], spelled_out(facts["shapes"]))
    for name, words in (("f32", ["F32"]), ("q", ["Q4_0", "--token-embedding-type", "Q4_0"])):
        assert cli("quantize", folder, tmp_path / f"{name}.gguf", *words)[0] == 0
    weights = dequantize(GGUFFile.open(tmp_path / "f32.gguf").tensors["token_embd.weight"])
    quantized = GGUFFile.open(tmp_path / "q.gguf").tensors["token_embd.weight"]
    assert np.array_equal(quantized.data, encode(quantized.format.name, weights))
