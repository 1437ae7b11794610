"""Writing GGUF files, compared with the gguf package and with the file read before."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_model import finish

from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, PackedValue, pack_value, write_gguf
from localllm.quant.formats import BY_NAME

VALUES = {
    "a.uint32": 7,
    "a.int32": -7,
    "a.uint64": 1 << 40,
    "a.int64": -(1 << 40),
    "a.float": 0.5,
    "a.double": np.float64(0.1),
    "a.byte": np.uint8(200),
    "a.bool": True,
    "a.text": "héllo",
    "a.bytes": b"\xff\x00",
    "a.empty": "",
    "a.texts": ["a", "", "bc"],
    "a.none": [],
    "a.numbers": [1, -2],
    "a.floats": [0.5, 1],
    "a.bools": [True, False],
    "a.array": np.arange(5, dtype=np.int16),
}
TYPES = ["UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "FLOAT64", "UINT8", "BOOL", "STRING", "STRING", "STRING"]


def test_values_have_the_types_that_readers_expect(tmp_path: Path):
    write_gguf(tmp_path / "x.gguf", VALUES, [])
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    for (key, value), kind in zip(VALUES.items(), TYPES, strict=False):
        assert fields[key].types == [gguf.GGUFValueType[kind]], key
        if not isinstance(value, bytes):
            assert fields[key].contents() == value
    assert [fields[key].types[1].name for key in ("a.numbers", "a.floats", "a.bools", "a.array")] == [
        "INT32",
        "FLOAT32",
        "BOOL",
        "INT16",
    ]
    assert fields["a.texts"].contents() == ["a", "", "bc"] and fields["a.none"].contents() == []
    assert fields["a.array"].contents() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [None, {}, [None], ["a", 1], 1 << 64, object()])
def test_values_that_no_file_holds_are_refused(value):
    with pytest.raises((TypeError, StopIteration, OverflowError)):
        pack_value(value)


def test_a_copied_file_has_the_same_bytes(tmp_path: Path):
    """Copy a file that the gguf package wrote."""
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_custom_alignment(64)
    writer.add_array("x.list", [["a"], ["b", "c"]])
    writer.add_float64("x.double", 0.1)
    writer.add_tensor("one", np.arange(3, dtype=np.float32))
    writer.add_tensor("two", np.ones((2, 3, 5), np.float16))
    finish(writer)
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        metadata = {key: PackedValue(value) for key, value in file.packed.items()}
        tensors = [OutputTensor(t.name, t.format, t.shape, list(t.data.reshape(-1, 2))) for t in file.tensors.values()]
        write_gguf(tmp_path / "b.gguf", metadata, tensors)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_arrays_become_tensors_with_their_values(tmp_path: Path):
    arrays = {f"t.{kind}": np.arange(6).reshape(2, 3).astype(kind) for kind in ("f4", "f2", "f8", "i4", "i1")}
    write_gguf(tmp_path / "x.gguf", {}, [OutputTensor.from_array(name, array) for name, array in arrays.items()])
    for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        np.testing.assert_array_equal(tensor.data, arrays[tensor.name])


def test_too_few_bytes_make_no_file(tmp_path: Path):
    short = OutputTensor("x", BY_NAME["F32"], (4,), (bytes(12),))
    with pytest.raises(ValueError, match="tensor x: expected 16 bytes, found 12"):
        write_gguf(tmp_path / "x.gguf", {}, [short])
    assert list(tmp_path.iterdir()) == []


def test_writing_into_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(LocalllmError, match="cannot be written: No such file"):
        write_gguf(tmp_path / "none" / "x.gguf", {}, [])
