"""GGUF files: what is read equals what was written, and everything that is wrong is refused with one clear line."""

import errno
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_model import finish

from localllm.errors import MemoryLimitError, ModelError
from localllm.files.gguf import file as gguf_file
from localllm.files.gguf import header as gguf_header
from localllm.files.gguf.file import GGUFFile

F32, Q8_0 = 0, 8  # formats
U8, I32, U32, STRING, ARRAY, BOOL, U64 = 0, 5, 4, 8, 9, 7, 10  # value types


# ---- files by hand, so that any part of them can be wrong


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor(name: str | bytes = "w", dimensions=(4,), format: int = F32, offset: int = 0) -> bytes:
    counts = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + counts + struct.pack("<IQ", format, offset)


def built(keys=(), tensors=(), weights: int = 0, alignment: int = 32, version: int = 3) -> bytes:
    """A whole file with `weights` bytes of weights, which count up."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    padding = b"\0" * (-len(header) % alignment)
    return header + padding + bytes(number % 251 for number in range(weights))


def opened(folder: Path, content: bytes, name: str = "model.gguf") -> GGUFFile:
    path = folder / name
    path.write_bytes(content)
    return GGUFFile.open(path)


def refusal(path: Path) -> str:
    """Return the message with which the file is refused: one printable line that starts with its path."""
    with pytest.raises(ModelError) as error:
        GGUFFile.open(path)
    message = str(error.value)
    assert message.isprintable()
    return message


# ---- round trips


def write_everything(path: Path, alignment: int = 32) -> dict[str, np.ndarray]:
    """Write every value type and several tensor formats by the gguf package; return the tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name, limit in (("uint8", 2**8), ("uint16", 2**16), ("uint32", 2**32), ("uint64", 2**64)):
        getattr(writer, f"add_{name}")(f"test.{name}", limit - 1)
    for name, limit in (("int8", 2**7), ("int16", 2**15), ("int32", 2**31), ("int64", 2**63)):
        getattr(writer, f"add_{name}")(f"test.{name}", -limit)
    writer.add_float32("test.float32", 1.5)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.true", True)
    writer.add_bool("test.false", False)
    writer.add_string("test.string", "naïve 模型\n")
    writer.add_array("test.strings", ["a", "é", "", "Ġthe"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -0.25])
    writer.add_array("test.bools", [True, False, True])
    random = np.random.default_rng(0)
    tensors = {"f32": random.normal(size=(3, 5)).astype(np.float32), "vector": np.arange(7, dtype=np.float32)}
    tensors["f16"] = random.normal(size=(2, 3, 4)).astype(np.float16)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16):
        tensors[kind.name] = gguf.quantize(random.normal(size=(2, 3, 5, 64)).astype(np.float32), kind)
        writer.add_tensor(kind.name, tensors[kind.name], raw_dtype=kind)
    finish(writer)
    return tensors


@pytest.mark.parametrize("alignment", [32, 64])
def test_files_of_the_gguf_package_read_back_equal(tmp_path, alignment):
    tensors = write_everything(tmp_path / "model.gguf", alignment)
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        get = file.metadata.__getitem__
        assert [get(f"test.uint{bits}") for bits in (8, 16, 32, 64)] == [2**bits - 1 for bits in (8, 16, 32, 64)]
        assert [get(f"test.int{bits}") for bits in (8, 16, 32, 64)] == [-(2 ** (bits - 1)) for bits in (8, 16, 32, 64)]
        assert (get("test.float32"), get("test.float64"), get("test.string")) == (1.5, 0.1, "naïve 模型\n")
        assert get("test.true") is True and get("test.false") is False
        assert get("test.strings") == ["a", "é", "", "Ġthe"]
        assert get("test.integers").tolist() == [1, -2, 3] and get("test.floats").tolist() == [0.5, -0.25]
        assert get("test.bools").dtype == np.bool_ and get("test.bools").tolist() == [True, False, True]
        assert not get("test.integers").flags.writeable
        assert list(file.tensors) == list(tensors)
        for name, expected in tensors.items():
            assert file.tensors[name].data.tobytes() == expected.tobytes()
        assert file.nbytes == sum(expected.nbytes for expected in tensors.values())
        assert file.parameters == 15 + 7 + 24 + 3 * 2 * 3 * 5 * 64


def test_tensors_have_the_shapes_and_formats_written(tmp_path):
    write_everything(tmp_path / "model.gguf")
    tensors = GGUFFile.open(tmp_path / "model.gguf").tensors
    seen = {name: (tensor.format.name, tensor.shape, tensor.data.shape) for name, tensor in tensors.items()}
    assert seen["vector"] == ("F32", (7,), (28,))
    assert seen["f32"] == ("F32", (3, 5), (3, 20))
    assert seen["f16"] == ("F16", (2, 3, 4), (2, 3, 8))
    assert seen["Q8_0"] == ("Q8_0", (2, 3, 5, 64), (2, 3, 5, 68))
    assert all(tensor.data.dtype == np.uint8 and not tensor.data.flags.writeable for tensor in tensors.values())


def test_files_read_as_by_the_gguf_packages_reader(model_path):
    for name in ("llama", "llama_yarn", "gemma4", "lfm2", "gpt_oss"):
        file, reader = GGUFFile.open(model_path(name)), gguf.GGUFReader(model_path(name))
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for expected in reader.tensors:
            tensor = file.tensors[expected.name]
            assert tensor.format.name == expected.tensor_type.name
            assert tensor.shape == tuple(expected.shape.tolist()[::-1])
            assert tensor.data.tobytes() == expected.data.tobytes()
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata.keys() == fields.keys()
        for name, field in fields.items():
            value = file.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_views_outlive_the_file(tmp_path):
    tensors = write_everything(tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        data, integers = file.tensors["f32"].data, file.metadata["test.integers"]
    assert file.tensors == {} and file.metadata == {}
    assert data.tobytes() == tensors["f32"].tobytes() and integers.tolist() == [1, -2, 3]


def test_a_vocabulary_of_128k_is_read_whole(tmp_path):
    tokens = [f"token{number}é" for number in range(128_256)]
    merges = [f"a{number} b" for number in range(280_000)]
    keys = [
        key("tokenizer.ggml.tokens", ARRAY, array(STRING, len(tokens), b"".join(map(text, tokens)))),
        key("tokenizer.ggml.merges", ARRAY, array(STRING, len(merges), b"".join(map(text, merges)))),
        key("tokenizer.ggml.token_type", ARRAY, array(I32, len(tokens), struct.pack("<i", 1) * len(tokens))),
    ]
    metadata = opened(tmp_path, built(keys)).metadata
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["tokenizer.ggml.merges"] == merges
    assert metadata["tokenizer.ggml.token_type"].shape == (128_256,)


def test_version_2_and_files_without_tensors_are_read(tmp_path):
    assert opened(tmp_path, built([key("a", U8, b"\7")], version=2)).metadata == {"a": 7}
    assert opened(tmp_path, built()).tensors == {}


def test_empty_arrays_may_end_the_file(tmp_path):
    keys = [key("s", ARRAY, array(STRING, 0)), key("b", ARRAY, array(BOOL, 0)), key("n", ARRAY, array(U32, 0))]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)
    metadata = opened(tmp_path, header).metadata
    assert metadata["s"] == [] and metadata["b"].size == 0 and metadata["n"].size == 0


def test_arrays_in_arrays_are_read(tmp_path):
    inner = array(U8, 2, b"\1\2") + array(STRING, 1, text("x"))
    arrays: Any = opened(tmp_path, built([key("a", ARRAY, array(ARRAY, 2, inner))])).metadata["a"]
    numbers, strings = arrays
    assert numbers.tolist() == [1, 2] and strings == ["x"]


def test_text_that_is_not_utf_8_stays_readable_and_distinct(tmp_path):
    tokens = array(STRING, 3, text(b"\xff") + text(b"\xfe") + text("ok"))
    metadata = opened(tmp_path, built([key("tokens", ARRAY, tokens), key("name", STRING, text(b"M\xe9"))])).metadata
    assert metadata == {"tokens": ["\\xff", "\\xfe", "ok"], "name": "M\\xe9"}


def test_tensors_may_come_in_any_order(tmp_path):
    tensors = [tensor("second", (4,), offset=32), tensor("first", (2, 2), offset=0)]
    file = opened(tmp_path, built(tensors=tensors, weights=48))
    assert file.tensors["second"].data.tolist() == list(range(32, 48))
    assert file.tensors["first"].data.tolist() == [list(range(8)), list(range(8, 16))]


# ---- what is refused

ALIGNMENT = "general.alignment"
REFUSALS = {
    "version 1": (built(version=1), "the GGUF version must be 2 or 3 (found 1)"),
    "version 4": (built(version=4), "the GGUF version must be 2 or 3 (found 4)"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only the magic": (b"GGUF", "the file ends at byte 4 but this needs 8 bytes"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "tensor count: the file ends at byte 24"),
    "huge tensor count": (
        b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
        "tensor count: 18446744073709551615 is too large",
    ),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1000), "metadata key count: the file ends at byte 24"),
    "huge key count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        "metadata key count: 9223372036854775808 is too large",
    ),
    "long key": (
        built([key("a" * 65536, U8, b"\1")]),
        "metadata key 0: the name must have 1 to 65535 bytes (found 65536)",
    ),
    "key not UTF-8": (built([key(b"\xff\x1b", U8, b"\1")]), r"the name b'\xff\x1b' must consist of ASCII"),
    "key twice": (built([key("a.b", U8, b"\1")] * 2), "a.b: the file has this metadata key twice"),
    "key with escapes": (built([key("\x1b[31m\0", 99, b"")]), r"key 0: the name b'\x1b[31m\x00' must consist of ASCII"),
    "value type": (built([key("a", 13, b"\1")]), "a: the value type must be from 0 to 12 (found 13)"),
    "element type": (built([key("a", ARRAY, array(13, 1, b"\1"))]), "a: the element type must be from 0 to 12"),
    "bool": (built([key("a", BOOL, b"\2")]), "a: a bool must be 0 or 1 (found 2)"),
    "bools": (built([key("a", ARRAY, array(BOOL, 2, b"\1\3"))]), "a: a bool must be 0 or 1 (found 3)"),
    "string length": (
        built([key("a", STRING, struct.pack("<Q", 2**63))]),
        "a: the file ends at byte 64 but this needs",
    ),
    "numbers count": (built([key("a", ARRAY, array(U64, 2**61))]), "a: the file ends at byte 64 but this needs"),
    "strings count": (built([key("a", ARRAY, array(STRING, 2**61))]), "a: the file ends at byte 64 but this needs"),
    "arrays count": (built([key("a", ARRAY, array(ARRAY, 2**62))]), "a: the file ends at byte 64 but this needs"),
    "string in an array": (
        built([key("a", ARRAY, array(STRING, 2, struct.pack("<QQ", 2**64 - 1, 0)))]),
        "a: the file ends at byte 96 but this needs 18446744073709551",
    ),
    "last string in an array": (
        built([key("a", ARRAY, array(STRING, 1, struct.pack("<Q", 1000)))]),
        "a: the file ends at byte 64 but this needs 1",
    ),
    "arrays too deep": (
        built([key("a", ARRAY, array(ARRAY, 1) * 4 + array(U8, 0))]),
        "a: arrays must be nested at most 4 deep",
    ),
    "alignment 0": (built([key(ALIGNMENT, U32, struct.pack("<I", 0))]), "power of two from 8 to 65536 (found 0)"),
    "alignment 48": (built([key(ALIGNMENT, U32, struct.pack("<I", 48))]), "power of two from 8 to 65536 (found 48)"),
    "alignment 4": (built([key(ALIGNMENT, U32, struct.pack("<I", 4))]), "power of two from 8 to 65536 (found 4)"),
    "alignment text": (built([key(ALIGNMENT, STRING, text("32"))]), "general.alignment: the value must be of type 4"),
    "alignment bool": (built([key(ALIGNMENT, BOOL, b"\1")]), "general.alignment: the value must be of type 4"),
    "alignment array": (built([key(ALIGNMENT, ARRAY, array(U8, 1, b"\1"))]), "the value must be of type 4"),
    "no dimensions": (built(tensors=[tensor(dimensions=())]), "tensor w: expected 1 to 4 dimensions, found 0"),
    "five dimensions": (built(tensors=[tensor(dimensions=(1,) * 5)]), "tensor w: expected 1 to 4 dimensions, found 5"),
    "dimension 0": (built(tensors=[tensor(dimensions=(4, 0))], weights=64), "tensor w: shape [0, 4]: every dimension"),
    "format": (
        built(tensors=[tensor(format=999)], weights=64),
        "tensor w: format 999 is unknown; update localllm or quantize",
    ),
    "removed format": (
        built(tensors=[tensor(format=4)], weights=64),
        "tensor w: format 4 is unknown; update localllm or quantize",
    ),
    "row length": (
        built(tensors=[tensor(dimensions=(33, 2), format=Q8_0)], weights=99),
        "tensor w: the row length 33 must be a multiple of 32, the block size of Q8_0",
    ),
    "offset": (
        built(tensors=[tensor(offset=4)], weights=99),
        "tensor w: the offset 4 must be a multiple of the alignment 32",
    ),
    "truncated": (
        built(tensors=[tensor(dimensions=(8, 4))], weights=127),
        "tensor w: the file ends at byte 223 but needs 224 bytes for it: download incomplete?",
    ),
    "offset past the end": (
        built(tensors=[tensor(offset=2**63)]),
        "tensor w: the file ends at byte 64 but needs 92233720",
    ),
    "huge tensor": (built(tensors=[tensor(dimensions=(2**63,) * 4)]), "tensor w: the file ends at byte 96 but needs"),
    "overlap": (
        built(tensors=[tensor("a", (16,)), tensor("b", (8,), offset=32)], weights=64),
        "tensor b: offset 32 is within tensor a, which ends at 64",
    ),
    "same place": (built(tensors=[tensor("a"), tensor("b")], weights=64), "tensor b: offset 0 is within tensor a"),
    "tensor twice": (
        built(tensors=[tensor(), tensor(offset=32)], weights=64),
        "tensor w: the file has this tensor twice",
    ),
    "long name": (built(tensors=[tensor("x" * 65)]), "name of tensor 0: the name must have 1 to 63 bytes (found 65)"),
    "name not UTF-8": (built(tensors=[tensor(b"\xc3")]), r"name of tensor 0: the name b'\xc3' must consist of ASCII"),
    "name with escapes": (built(tensors=[tensor("\x1b]0;x\7\n")]), r"the name b'\x1b]0;x\x07\n' must consist of ASCII"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_file_is_refused(tmp_path, case):
    content, expected = REFUSALS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}: ") and expected in message


def nested(depth: int) -> bytes:
    """Return arrays nested so deep, with numbers in the innermost."""
    return array(ARRAY, 1) * (depth - 1) + array(U8, 0)


def of_strings(name: str, *lengths: int) -> bytes:
    return key(name, ARRAY, array(STRING, len(lengths), b"".join(text("x" * length) for length in lengths)))


def of_arrays(*counts: int) -> bytes:
    inner = b"".join(array(ARRAY, count, array(U8, 0) * count) for count in counts)
    return key("a", ARRAY, array(ARRAY, len(counts), inner))


def number(value: int) -> bytes:
    return key(ALIGNMENT, U32, struct.pack("<I", value))


TOKENS = "tokenizer.ggml.tokens"
LAST_THAT_FIT = {  # a limit, what just fits, what does not, and why
    "tensors": ("MAX_TENSORS", 2, built(tensors=[tensor("a"), tensor("b", offset=32)], weights=64),
                built(tensors=[tensor(name) for name in "abc"]),
                "tensor count: 3 is too large; expected at most 2"),
    "keys": ("MAX_KEYS", 2, built([key(name, U8, b"1") for name in "ab"]),
             built([key(name, U8, b"1") for name in "abc"]),
             "metadata key count: 3 is too large; expected at most 2"),
    "strings": ("MAX_ITEMS", 3, built([of_strings("a", 1, 1), of_strings("b", 1)]),
                built([of_strings("a", 1, 1), of_strings("b", 1, 1)]),
                "b: the metadata's arrays must have at most 3 strings"),
    "arrays": ("MAX_ARRAYS", 5, built([of_arrays(1, 2)]), built([of_arrays(1, 3)]),
               "a: the metadata's arrays must have at most 5 arrays"),
    "depth": ("MAX_DEPTH", 4, built([key("a", ARRAY, nested(4))]), built([key("a", ARRAY, nested(5))]),
              "a: arrays must be nested at most 4 deep"),
    "a string": ("MAX_ITEM_BYTES", 1 << 16, built([of_strings("a", 1, 65536)]), built([of_strings("a", 1, 65537)]),
                 "a: string 1 of the array must have at most 65536 bytes (found 65537)"),
    "a token": ("MAX_ITEM_BYTES", 1 << 16, built([of_strings(TOKENS, 1, 65536)]),
                built([of_strings(TOKENS, 1, 65537)]),
                f"{TOKENS}: string 1 of the array must have at most 65536 bytes (found 65537)"),
    "the last token": ("MAX_ITEM_BYTES", 1 << 16, built([of_strings(TOKENS, 65536)])[: 24 + 8 + 21 + 16 + 8 + 65536],
                       built([of_strings(TOKENS, 65537)])[:-64],
                       f"{TOKENS}: the file ends at byte 65568 but this needs 65614 bytes: download incomplete?"),
    "a key": ("MAX_KEY_BYTES", 65535, built([key("a" * 65535, U8, b"1")]), built([key("a" * 65536, U8, b"1")]),
              "metadata key 0: the name must have 1 to 65535 bytes (found 65536)"),
    "no key": ("MAX_KEY_BYTES", 65535, built([key("a", U8, b"1")]), built([key("", U8, b"1")]),
               "metadata key 0: the name must have 1 to 65535 bytes (found 0)"),
    "a name": ("MAX_NAME_BYTES", 63, built(tensors=[tensor("x" * 63)], weights=32), built(tensors=[tensor("x" * 64)]),
               "name of tensor 0: the name must have 1 to 63 bytes (found 64)"),
    "dimensions": ("MAX_DIMENSIONS", 4, built(tensors=[tensor(dimensions=(2, 1, 1, 4))], weights=32),
                   built(tensors=[tensor(dimensions=(2, 1, 1, 1, 4))]), "tensor w: expected 1 to 4 dimensions, found 5"
                   ),
    "small alignment": ("MAX_ALIGNMENT", 65536, built([number(8)], alignment=8), built([number(4)], alignment=4),
                        f"{ALIGNMENT}: the alignment must be a power of two from 8 to 65536 (found 4)"),
    "large alignment": ("MAX_ALIGNMENT", 65536, built([number(65536)], alignment=65536),
                        built([number(131072)], alignment=131072),
                        f"{ALIGNMENT}: the alignment must be a power of two from 8 to 65536 (found 131072)"),
    "a bool": ("BOOL", 7, built([key("a", BOOL, b"\1"), key("b", ARRAY, array(BOOL, 2, b"\0\1"))]),
               built([key("b", ARRAY, array(BOOL, 2, b"\0\2"))]), "b: a bool must be 0 or 1 (found 2)"),
    "a type": ("STRING", 8, built([key("a", 12, bytes(8))]), built([key("a", 2**32 - 1, bytes(8))]),
               "a: the value type must be from 0 to 12 (found 4294967295)"),
    "tensors in the file": ("MAX_TENSORS", 1 << 17, built(tensors=[tensor("w" * 8)], weights=16),
                            b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + bytes(63),
                            "tensor count: the file ends at byte 87 but this needs 88 bytes: download incomplete?"),
    "keys in the file": ("MAX_KEYS", 1 << 16, built([key("a", U8, b"1")])[:38],
                         b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + bytes(25),
                         "metadata key count: the file ends at byte 49 but this needs 50 bytes: download incomplete?"),
    "strings in the file": ("MAX_ITEMS", 1 << 22, built([of_strings("a", 0, 0)])[: 24 + 9 + 16 + 16],
                            built([key("a", ARRAY, array(STRING, 2))])[:49] + bytes(15),
                            "a: the file ends at byte 64 but this needs 65 bytes: download incomplete?"),
    "a string in the file": ("MAX_ITEMS", 1 << 22, built([of_strings("a", 3)])[: 24 + 9 + 16 + 11],
                             built([of_strings("a", 3)])[: 24 + 9 + 16 + 10],
                             "a: the file ends at byte 59 but this needs 60 bytes: download incomplete?"),
    "a length in the file": ("MAX_ITEMS", 1 << 22, built([of_strings("a", 4, 0)])[: 24 + 9 + 16 + 20],
                             built([of_strings("a", 4, 0)])[: 24 + 9 + 16 + 19],
                             "a: the file ends at byte 68 but this needs 69 bytes: download incomplete?"),
    "a gap": ("DEFAULT_ALIGNMENT", 32, built(tensors=[tensor("a", (9,)), tensor("b", offset=64)], weights=80),
              built(tensors=[tensor("a", (8,)), tensor("b", offset=64)], weights=80),
              "tensor b: offset 64 leaves a gap; the data before it ends at 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAST_THAT_FIT)
def test_a_file_at_a_limit_is_read_and_one_beyond_refused(tmp_path, monkeypatch, case: str):
    name, limit, fitting, refused, message = LAST_THAT_FIT[case]
    usual = {"MAX_TENSORS": 1 << 17, "MAX_KEYS": 1 << 16, "MAX_ITEMS": 1 << 22, "MAX_ARRAYS": 1 << 16}
    assert getattr(gguf_header, name) == usual.get(name, limit)
    monkeypatch.setattr(gguf_header, name, limit)
    assert opened(tmp_path, fitting)
    (tmp_path / "model.gguf").write_bytes(refused)
    assert refusal(tmp_path / "model.gguf") == f"{tmp_path / 'model.gguf'}: {message}"


def test_a_longer_text_is_refused_when_it_is_read(tmp_path, monkeypatch):
    assert gguf_header.MAX_TEXT_BYTES == 1 << 22
    monkeypatch.setattr(gguf_header, "MAX_TEXT_BYTES", 5)
    metadata = opened(
        tmp_path, built([key("a.b", STRING, text("12345")), key("long", STRING, text("123456"))])
    ).metadata
    assert metadata["a.b"] == "12345" and metadata.is_text("long")
    for _ in range(2):
        with pytest.raises(ModelError) as failure:
            metadata["long"]
        assert str(failure.value) == f"{tmp_path / 'model.gguf'}: long: the string must have at most 5 bytes (found 6)"


def test_long_and_odd_names_are_cut_and_escaped_in_messages(tmp_path):
    path = tmp_path / "model.gguf"
    for length, name in ((100, "a" * 100), (101, "a" * 100 + "…")):
        path.write_bytes(built([key("a" * length, U8, b"1")] * 2))
        assert refusal(path) == f"{path}: {name}: the file has this metadata key twice"
        path.write_bytes(built([key(b"\xff" * length, U8, b"1")]))
        shown = repr(b"\xff" * 100)
        assert refusal(path).startswith(f"{path}: metadata key 0: the name {shown} must consist of ASCII")
    for odd in ("a b", "a\x7f", "é"):
        path.write_bytes(built(tensors=[tensor(odd)]))
        assert f"the name {odd.encode()!r} must consist of" in refusal(path)
    texts = ("a" * 100, "a" * 101, "", "a\n", "a" * 99 + "\n", "a" * 100 + "\n")
    expected = ["a" * 100, "a" * 100 + "…", "''", r"'a\n'", "'" + "a" * 99 + r"\n'", "a" * 100 + "…"]
    assert [gguf_header.printable(each) for each in texts] == expected and gguf_header.printable("abcd", 3) == "abc…"
    path = "/a\u3000b\xa0c/é.gguf"
    assert gguf_header.printable(path) == path and gguf_header.printable("\u2028") == r"'\u2028'"


def test_strings_are_counted_without_decoding_them(tmp_path):
    """Expect the same counts before somebody reads a value and afterwards."""
    numbers, nested = (
        key("n", ARRAY, array(U8, 2, b"12")),
        key("a", ARRAY, array(ARRAY, 1, array(STRING, 1, text("x")))),
    )
    keys = [of_strings(TOKENS, 1, 2, 3), of_strings("three", 1, 2, 3), of_strings("none"), numbers, nested]
    metadata = opened(tmp_path, built([*keys, key("t", STRING, text("")), key("u", U8, b"1")])).metadata
    for is_read in (False, True):
        counts = {name: metadata.count_strings(name) for name in (TOKENS, "three", "none", "n", "t", "u", "missing")}
        assert counts == {TOKENS: 3, "three": 3, "none": 0, "n": None, "t": None, "u": None, "missing": None}
        assert [name for name in (*metadata.data, "missing") if metadata.is_text(name)] == ["t"]
        assert isinstance(metadata.data["three"], list) == is_read
        assert metadata["three"] == ["x", "xx", "xxx"] and metadata["none"] == [] and metadata["a"] == [["x"]]


def test_changing_metadata_drops_recorded_file_offsets(tmp_path):
    content = built([key("a", U8, b"1"), key("b", U8, b"2"), of_strings(TOKENS, 1)])
    for change in (lambda metadata: metadata.__setitem__("a", 7), lambda metadata: metadata.__delitem__("a")):
        metadata = opened(tmp_path, content).metadata
        metadata.kept["x"] = None
        assert metadata.places.keys() == {"a", "b", TOKENS} and metadata.compute_fingerprint("a", "b")
        change(metadata)
        assert metadata.get("a") in (7, None) and metadata["b"] == ord("2")
        assert metadata.places == metadata.kept == {} and metadata.compute_fingerprint("b") is None
    assert gguf_header.Metadata({"a": 1}) == {"a": 1}


def test_more_strings_than_memory_can_hold_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(built([key("a", ARRAY, array(STRING, 2**30))]))
    os.truncate(path, 2**34)  # sparse: takes no room on the disk
    assert "arrays must have at most 4194304 strings" in refusal(path)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    keys = [
        key("a", ARRAY, array(STRING, 2, text("x") + text("yz"))),
        key("b", BOOL, b"\1"),
        key("c", STRING, text("d")),
    ]
    content = built(keys, [tensor("w", (32, 2), Q8_0)], weights=68)
    assert opened(tmp_path, content).tensors["w"].nbytes == 68
    for length in range(4, len(content)):
        path.write_bytes(content[:length])
        assert f"the file ends at byte {length} but" in refusal(path)


OTHER_FILES = {
    "the file does not exist": None,
    "found an empty file": b"",
    "zip archive": b"PK\3\4 and more",
    "safetensors": struct.pack("<Q", 1000) + b'{"__metadata__":{}}',
    "HTML page": b"\n<!DOCTYPE html><html>",
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "JSON": b'{"architectures": []}',
    "older than GGUF": b"tjgg\3\0\0\0",
    "download incomplete": b"\0" * 4096,
    "does not begin with GGUF": b"\x1b[2J\x1b[2J",
}


@pytest.mark.parametrize("expected", OTHER_FILES)
def test_a_file_in_another_format_is_named_in_the_error(tmp_path, expected):
    path = tmp_path / "model.gguf"
    if OTHER_FILES[expected] is not None:
        path.write_bytes(OTHER_FILES[expected])
    message = refusal(path)
    assert message.startswith(f"{path}: ") and expected in message


def test_irregular_files_are_refused(tmp_path):
    assert "a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "found no regular file" in refusal(tmp_path / "pipe")
    assert "found no regular file" in refusal(Path("/dev/zero"))
    assert "cannot be read" in refusal(tmp_path / "model.gguf\0")
    assert r"\x1b[2J.gguf" in refusal(tmp_path / "\x1b[2J.gguf")


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "model.gguf"
    path.write_bytes(built())
    monkeypatch.setattr("localllm.files.gguf.file.open_file", denied)
    assert refusal(path) == f"{path}: no permission to read this file"


# ---- split files


def number_key(name: str, value: int) -> bytes:
    return key(name, I32, struct.pack("<i", value))


def write_split(folder: Path, numbers=(0, 1, 2), counts=(3, 3, 3), total: int = 3, names=("a", "b", "c")) -> list[Path]:
    """Write three files with a tensor each; the first alone has the model's metadata."""
    paths = []
    for index in range(3):
        keys = [number_key("split.no", numbers[index]), number_key("split.count", counts[index])]
        keys += [number_key("split.tensors.count", total)] + [key("general.name", STRING, text("m"))] * (index == 0)
        paths.append(folder / f"model-{index + 1:05d}-of-00003.gguf")
        paths[-1].write_bytes(built(keys, [tensor(names[index], (4,))], weights=16 + index))
    return paths


def test_a_split_model_opens_by_any_of_its_files(tmp_path):
    for path in write_split(tmp_path):
        file = GGUFFile.open(path)
        assert file.metadata["general.name"] == "m" and file.path == str(path)
        assert list(file.tensors) == ["a", "b", "c"] and file.parameters == 12


def test_parts_of_different_models_are_refused(tmp_path):
    """Compare all keys but the number of each."""
    paths = write_split(tmp_path)
    for number, name in ((1, "m"), (2, "other")):
        keys = [number_key("split.no", number), number_key("split.count", 3), number_key("split.tensors.count", 3)]
        keys.append(key("general.name", STRING, text(name)))
        paths[number].write_bytes(built(keys, [tensor("abc"[number], (4,))], weights=16 + number))
    expected = f"{paths[2]}: general.name: must equal that of {paths[0]}: files of different models?"
    assert refusal(paths[0]) == refusal(paths[1]) == expected


def test_the_main_format_is_that_of_most_weights(tmp_path):
    assert opened(tmp_path, built([])).main_format == "none"
    assert opened(tmp_path, built([], [tensor("a", (4,))], weights=16)).main_format == "F32"


def test_a_merged_model_opens_as_one_file(tmp_path):
    assert opened(tmp_path, built([number_key("split.count", 0)])).metadata == {"split.count": 0}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"split.no": 0, "split.count": 1, "split.tensors.count": 1}, None),
        ({"split.no": 0}, None), ({"split.tensors.count": 1}, None), ({"split.count": 1}, None),
        ({"split.no": 1}, "split.no: expected 0, found 1, in a file that is not split"),
        ({"split.no": 2, "split.count": 1}, "split.no: expected 0, found 2, in a file that is not split"),
        ({"split.tensors.count": 2}, "split.tensors.count: expected 1, found 2, in a file that is not split"),
        ({"split.tensors.count": 0}, "split.tensors.count: expected 1, found 0, in a file that is not split"),
        ({"split.count": -1}, "split.count: expected an integer, found -1"),
    ],
)  # fmt: skip
def test_a_single_file_must_be_whole(tmp_path, keys: dict[str, int], problem: str | None):
    """Accept the keys left behind by merging; refuse one part of several as a model."""
    path = tmp_path / "x.gguf"
    path.write_bytes(built([number_key(*each) for each in keys.items()], [tensor("a", (4,))], weights=16))
    if problem:
        assert refusal(path) == f"{path}: {problem}"
    else:
        assert list(GGUFFile.open(path).tensors) == ["a"]


def test_a_missing_part_is_named(tmp_path):
    paths = write_split(tmp_path)
    paths[1].unlink()
    assert refusal(paths[0]) == f"{paths[1]}: this file is missing; the model is split into 3 files"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"numbers": (0, 2, 1)}, "model-00002-of-00003.gguf: split.no: expected 1, found 2"),
        ({"counts": (3, 4, 3)}, "model-00002-of-00003.gguf: split.count: expected 3, found 4"),
        ({"total": 4}, "model-00001-of-00003.gguf: split.tensors.count: expected 4 tensors, found 3"),
        ({"names": ("a", "b", "a")}, "model-00003-of-00003.gguf: tensor a: an earlier file"),
        ({"counts": (2, 2, 2)}, "model-00001-of-00003.gguf: split.count: this is one of the 2 files of a split model"),
    ],
)
def test_a_split_with_wrong_keys_is_refused(tmp_path, change, expected):
    assert expected in refusal(write_split(tmp_path, **change)[0])


def test_a_renamed_part_and_odd_split_keys_are_refused(tmp_path):
    paths = write_split(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    assert "expected a name that ends in -NNNNN-of-00003.gguf" in refusal(renamed)
    renamed.write_bytes(built([key("split.count", ARRAY, array(U8, 2, b"\1\2"))]))
    assert "split.count: expected an integer, found ndarray" in refusal(renamed)


def test_an_error_in_a_part_names_that_part(tmp_path):
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-10])
    assert refusal(paths[0]).startswith(f"{paths[2]}: tensor c: the file ends at")


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(errno.ENOMEM, MemoryLimitError, "not enough address space"), (errno.EIO, ModelError, "cannot be read: Input/")],
)
def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path, monkeypatch, number: int, kind: type, message: str):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(4096))

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gguf_file.mmap, "mmap", refuse)
    with pytest.raises(kind, match=message) as caught:
        GGUFFile.open(tmp_path / "model.gguf")
    assert type(caught.value) is kind
