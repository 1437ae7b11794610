"""Test changes of metadata, by `quantize` and by `edit`."""

import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint import write_checkpoint
from tiny_model import write_tiny_model

from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import pack_value
from localllm.quantizing.metadata_edits import parse_setting, resolve_edits, unpack_value
from localllm.quantizing.rewrite import get_packed_metadata


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


def weights(path: Path) -> bytes:
    return b"".join(tensor.data.tobytes() for tensor in GGUFFile.open(path).tensors.values())


TAGS = struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 2) + b"bc"
SETTINGS = {
    "general.name=Other": struct.pack("<IQ", 8, 5) + b"Other",
    "general.name=5": struct.pack("<IQ", 8, 1) + b"5",  # a string stays a string
    "llama.context_length=300": struct.pack("<II", 4, 300),  # a 32-bit integer stays one
    "llama.rope.freq_base=5": struct.pack("<If", 6, 5.0),
    "llama.rope.freq_base=f64:5": struct.pack("<Id", 12, 5.0),
    "tokenizer.ggml.token_type=[1, 2]": struct.pack("<IIQii", 9, 5, 2, 1, 2),
    "new.text=a text, and more": struct.pack("<IQ", 8, 16) + b"a text, and more",
    "new.number=-3": struct.pack("<Ii", 5, -3),
    "new.float=0.5": struct.pack("<If", 6, 0.5),
    "new.bool=true": struct.pack("<I?", 7, True),
    "new.u8=u8:200": struct.pack("<IB", 0, 200),
    "new.i64=i64:-1": struct.pack("<Iq", 11, -1),
    "new.b=bool:FALSE": struct.pack("<I?", 7, False),
    "new.text=str:5": struct.pack("<IQ", 8, 1) + b"5",
    "new.text=": struct.pack("<IQ", 8, 0),
    'general.tags=["a", "bc"]': TAGS,
    "general.tags=str[]:a, bc": TAGS,
    "new.numbers=[1, 2.5]": struct.pack("<IIQff", 9, 6, 2, 1, 2.5),
    "new.numbers=u16[]:1,2": struct.pack("<IIQHH", 9, 2, 2, 1, 2),
    "new.bools=[true, false]": struct.pack("<IIQ??", 9, 7, 2, True, False),
    "new.equation=a=b": struct.pack("<IQ", 8, 3) + b"a=b",
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_written_with_their_types(model: Path, cli, setting: str):
    key = setting.partition("=")[0]
    packed = get_packed_metadata(GGUFFile.open(model))
    assert parse_setting(setting, packed)[1] == SETTINGS[setting]
    if key in packed and not setting.startswith(("tokenizer", "llama.rope")):
        assert cli("quantize", model, model.with_name("q.gguf"), "Q8_0", "--set-metadata", setting)[0] == 0
        assert bytes(GGUFFile.open(model.with_name("q.gguf")).packed[key]) == SETTINGS[setting]


@pytest.mark.parametrize("setting", [
    "general.name", "=x", "llama.context_length=many", "llama.context_length=4294967296", "new=u8:256", "new=u8:-1",
    "new=bool:maybe", "new=f32:inf", "new=[1, [2]]", 'new=["a", 1]', "new=u8[]:1,x", "split.count=3", "sch\u00f6n=1",
    "general.alignment=3", "general.architecture=", "new=i32[]:[1",
])  # fmt: skip
def test_invalid_settings_are_refused(model: Path, cli, setting: str):
    before = model.read_bytes()
    code, _, err = cli("edit", model, "--set-metadata", setting)
    assert code == 2 and err.count("\n") == 1 and "--set-metadata" in err and model.read_bytes() == before


def test_packed_values_are_unpacked_unchanged():
    for value in (np.uint8(3), -5, 0.5, True, "text", ["a", "ü"], np.array([1, 2], np.uint16), [True, False]):
        assert np.array_equal(unpack_value(pack_value(value)), value)


def test_edited_keys_keep_their_order_and_new_ones_come_last(model: Path, cli):
    before = GGUFFile.open(model).packed
    words = ["--set-metadata", "general.name=X", "--set-metadata", "a.new=1", "--remove-metadata", "general.file_type"]
    assert cli("edit", model, model.with_name("e.gguf"), *words)[0] == 0
    after = GGUFFile.open(model.with_name("e.gguf")).packed
    assert list(after) == [key for key in before if key != "general.file_type"] + ["a.new"]
    assert all(np.array_equal(after[key], before[key]) for key in after if key not in ("general.name", "a.new"))
    assert weights(model.with_name("e.gguf")) == weights(model)


def test_a_header_that_fits_is_changed_in_place_and_can_be_restored(model: Path, cli):
    """Write the header only; store the old one beside the file."""
    before, node = model.read_bytes(), model.stat().st_ino
    code, out, _ = cli("edit", model, "--set-metadata", "general.name=Tiny Tesx")
    assert code == 0 and model.stat().st_ino == node and "model.gguf.header" in out
    changed = model.read_bytes()
    assert changed != before and changed.replace(b"Tiny Tesx", b"Tiny Test") == before
    assert GGUFFile.open(model).metadata["general.name"] == "Tiny Tesx"
    copy = model.with_name("model.gguf.header")
    assert before.startswith(copy.read_bytes())
    assert cli("edit", model, "--restore", copy)[0] == 0
    assert model.read_bytes() == before and model.with_name("model.gguf.header.2").exists()


def test_a_header_that_does_not_fit_rewrites_the_file(model: Path, cli):
    data = weights(model)
    code, out, _ = cli("edit", model, "--set-metadata", f"general.name={'long ' * 100}")
    assert code == 0 and "old header" not in out and [path.name for path in model.parent.iterdir()] == ["model.gguf"]
    assert weights(model) == data and GGUFFile.open(model).metadata["general.name"] == "long " * 100
    assert cli("run", model, "-p", "Hi", "-n", "1")[0] == 0


def test_a_stored_header_of_another_file_is_refused(model: Path, cli):
    other = model.with_name("other.header")
    assert cli("split", model, model.with_name("s"), "--split-max-tensors", "20")[0] == 0
    part = model.with_name("s-00001-of-00002.gguf").read_bytes()[:6000]
    for data in (b"GGUF", b"", model.read_bytes()[:100], model.read_bytes()[:8] + bytes(5000), part):
        other.write_bytes(data)
        before = model.read_bytes()
        code, _, err = cli("edit", model, "--restore", other)
        assert code == 2 and "must be a saved header" in err and model.read_bytes() == before, data[:10]


def test_edits_that_break_the_model_are_refused(model: Path, cli):
    before = model.read_bytes()
    for words in (["--set-metadata", "llama.block_count=3"], ["--remove-metadata", "llama.*"],
                  ["--set-metadata", "tokenizer.ggml.tokens=[]"]):  # fmt: skip
        code, _, err = cli("edit", model, *words)
        assert code == 3 and err.count("\n") == 1, words
    assert cli("edit", model, "--remove-metadata", "general.architecture")[0] == 2
    assert cli("edit", model)[0] == 2 and cli("edit", model, model, "--set-metadata", "a=1")[0] == 2
    assert model.read_bytes() == before and len(list(model.parent.iterdir())) == 1


def test_removing_a_missing_key_warns_or_fails_with_strict(model: Path, cli):
    words = ["--set-metadata", "a=1", "--remove-metadata", "nothing.*"]
    code, _, err = cli("edit", model, model.with_name("e.gguf"), *words)
    assert code == 0 and "--remove-metadata nothing.* matches no key" in err
    assert cli("edit", model, model.with_name("f.gguf"), *words, "--strict")[0] == 2
    code, _, err = cli("quantize", model, model.with_name("q.gguf"), "Q8_0", *words)
    assert code == 0 and "matches no key" in err
    assert cli("quantize", model, model.with_name("r.gguf"), "Q8_0", *words, "--strict")[0] == 2


def test_edit_and_quantize_set_a_chat_template(model: Path, cli, tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}\n")
    folder = write_checkpoint(tmp_path / "folder")
    for words in (("edit", model, tmp_path / "e.gguf"), ("quantize", folder, tmp_path / "e.gguf", "Q8_0", "--force")):
        assert cli(*words, "--chat-template-file", file)[0] == 0
        assert GGUFFile.open(tmp_path / "e.gguf").metadata["tokenizer.chat_template"] == file.read_text()


def test_a_chat_template_that_does_not_compile_warns_or_fails_with_strict(model: Path, cli, tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text("{% if %}")
    code, _, err = cli("edit", model, model.with_name("f.gguf"), "--chat-template-file", file)
    assert code == 0 and "warning" in err and "template.jinja" in err
    assert cli("edit", model, model.with_name("g.gguf"), "--chat-template-file", file, "--strict")[0] == 2
    assert cli("edit", model, "--chat-template-file", tmp_path / "none")[0] == 2


def test_editing_a_split_model_changes_its_first_file_only(model: Path, cli):
    assert cli("split", model, "--split-max-tensors", "8")[0] == 0
    first = model.with_name("model-00001-of-00003.gguf")
    assert cli("edit", first, model.with_name("e.gguf"), "--set-metadata", "general.name=Some longer name")[0] == 0
    edited = GGUFFile.open(model.with_name("e-00001-of-00003.gguf"))
    assert edited.metadata["general.name"] == "Some longer name" and len(edited.parts) == 3
    others = [path.read_bytes() for path in sorted(model.parent.glob("model-0000[23]*"))]
    assert others == [path.read_bytes() for path in sorted(model.parent.glob("e-0000[23]*"))]
    assert cli("edit", first, "--set-metadata", "general.name=Again another name")[0] == 0
    assert GGUFFile.open(first).metadata["general.name"] == "Again another name"
    assert cli("run", first, "-p", "Hi", "-n", "1")[0] == 0


def test_setting_and_removing_the_same_key_is_refused(model: Path, cli):
    code, _, err = cli("edit", model, "--set-metadata", "general.name=x", "--remove-metadata", "general.*")
    assert code == 2 and "every model needs it" in err
    edits = resolve_edits(["a=1"], [], None, {})
    assert edits.apply({"b": b""}) == {"b": b"", "a": pack_value(1)}
    code, _, err = cli("edit", model, "--set-metadata", "general.name=x", "--remove-metadata", "general.name")
    assert code == 2 and "either" in err
