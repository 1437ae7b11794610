"""Damaged GGUF files: whatever the bytes, opening one succeeds or raises ModelError, in bounded time and memory."""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from tests.unit.files.gguf.test_file import write_everything, write_split

# Numbers that break careless arithmetic, as a 32-bit or 64-bit field.
HOSTILE = [
    0,
    1,
    7,
    13,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**60,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Change a few bytes of `content`, replace numbers, remove, repeat or cut off pieces."""
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(damaged))
        match draw.randrange(6):
            case 0 | 1:
                damaged[place] = draw.randrange(256)
            case 2:
                damaged[place : place + 8] = struct.pack("<Q", draw.choice(HOSTILE))
            case 3:
                damaged[place : place + 4] = struct.pack("<I", draw.choice(HOSTILE) & 0xFFFFFFFF)
            case 4:
                damaged = damaged[: place + 1]
            case 5:
                end = place + draw.randint(1, 64)
                damaged[place:end] = damaged[place:end] * draw.choice([0, 2])
        if not damaged:
            break
    return bytes(damaged)


def outcome(path: Path) -> str:
    """Open the file and touch everything in it; return the message if it was refused."""
    try:
        with GGUFFile.open(path) as file:
            for tensor in file.tensors.values():
                assert tensor.data.nbytes == tensor.nbytes and tensor.data.sum() >= 0
            assert all(value is not None for value in file.metadata.values())
            return ""
    except ModelError as error:
        assert str(error).isprintable() and str(error).startswith(str(path.parent))
        return str(error)


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "model.gguf"
    write_everything(path)
    return path.read_bytes()


def header_size(content: bytes) -> int:
    """Return where the last tensor's name stands, near enough: most damage should hit the header, not the weights."""
    return content.index(b"BF16") + 64


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_read_or_refused_in_bounded_time(tmp_path, valid, seed):
    draw = random.Random(seed)
    size = header_size(valid)
    path = tmp_path / "model.gguf"
    outcomes = set()
    tracemalloc.start()
    start = time.process_time()
    for _ in range(500):
        path.write_bytes(damaged(valid[:size], draw) + valid[size:])
        outcomes.add(outcome(path).removeprefix(str(path)))
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(outcomes) > 50  # many rules were met, and some files survived
    assert "" in outcomes
    assert peak < 50e6
    assert seconds < 60  # a bound against hanging, not a measurement


def test_damaged_split_files_are_read_or_refused(tmp_path):
    draw = random.Random(0)
    paths = write_split(tmp_path)
    contents = [path.read_bytes() for path in paths]
    for _ in range(300):
        part = draw.randrange(3)
        paths[part].write_bytes(damaged(contents[part], draw))
        outcome(paths[draw.randrange(3)])
        paths[part].write_bytes(contents[part])
    assert outcome(paths[0]) == ""


def test_random_bytes_after_the_magic_are_read_or_refused(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "model.gguf"
    for _ in range(300):
        counts = struct.pack("<IQQ", 3, draw.randrange(4), draw.randrange(4))
        path.write_bytes(b"GGUF" + counts + draw.randbytes(draw.randrange(400)))
        outcome(path)
