"""Reading many strings at a time, against one after the other."""

import random

import numpy as np
import pytest

from localllm.files.gguf import header as gguf_header
from localllm.files.gguf import metadata
from localllm.files.gguf.header import HeaderReader

USUAL = ["a", "Ġthe", "本", " ", "\n\n", "x" * 200, "<|im_end|>", "é\ud7ff", "8" * 8]
UNUSUAL = [
    b"",
    b"\0",
    b"a\0\0\0\0\0\0\0b",
    b"\0" * 9,
    b"\xff\xfe",
    b"y" * 255,
    b"y" * 256,
    b"z" * 5000,
    b"\1\0\0\0\0\0\0\0",
]


def packed(strings: list[bytes]) -> bytes:
    return b"".join(len(string).to_bytes(8, "little") + string for string in strings)


@pytest.mark.parametrize("unusual", [None, *UNUSUAL], ids=lambda value: "none" if value is None else repr(value[:9]))
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 18])
def test_many_strings_read_as_one_by_one(monkeypatch, unusual, chunk):
    """Put an unusual one anywhere, end a chunk anywhere, and let anything come behind."""
    monkeypatch.setattr(gguf_header, "CHUNK", chunk)
    draw = random.Random(chunk)
    for place in (0, 1, 57, 299):
        strings = [draw.choice(USUAL).encode() for _ in range(300)]
        if unusual is not None:
            strings[place] = unusual
        data = packed(strings)
        for behind in (b"", b"\5\0\0\0\0\0\0\0after", bytes(40)):
            reader = HeaderReader(data + behind, "x")
            expected = [gguf_header.decode_utf8(string) for string in strings]
            assert (reader.read_strings(300), reader.position) == (expected, len(data))


def test_usual_strings_are_read_many_at_a_time():
    data = np.frombuffer(packed([string.encode() for string in USUAL * 50]) + b"\5\0\0\0", np.uint8)
    assert metadata.read_short_strings(data, 10**6) == (USUAL * 50, len(data) - 4)
    assert metadata.read_short_strings(data, 7) == (USUAL[:7], len(packed([s.encode() for s in USUAL[:7]])))
    for useless in (b"", b"\5", bytes(100), b"\5\0\0\0\0\0\0\0abc"):
        assert metadata.read_short_strings(np.frombuffer(useless, np.uint8), 9) == ([], 0)
