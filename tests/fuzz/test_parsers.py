"""Random bytes and texts by hypothesis: every reader returns a value or raises an error of localllm."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from localllm.errors import LocalllmError
from localllm.files import settings as config
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import SPACES
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations, read_imatrix, write_imatrix
from localllm.files.logits_file import MAGIC, LogitsFile, compute_row_width, count_scored_tokens
from localllm.quantizing.quantize import parse_override
from localllm.services.inspection.validate import require_valid
from localllm.services.records.lines import PromptBuilder, read_records
from localllm.text import templates
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.unit.files.gguf.test_file import write_everything
from tests.unit.quantizing.test_imatrix import legacy

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.sampled_from([0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**64 - 1])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes, most: int) -> bytes:
    """Change, take away or double some of the first `most` bytes, or end the file there."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, min(most, len(content)) - 1)))
        match draw(st.sampled_from("bnrde")):
            case "b":
                content[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "n":
                content[place : place + 8] = struct.pack("<Q", draw(NUMBERS))
            case "r":
                content[place : place + draw(st.integers(1, 64))] = b""
            case "d":
                content[place:place] = content[place : place + draw(st.integers(1, 64))]
            case "e":
                del content[place + 1 :]
    return bytes(content)


def gguf(path: Path) -> None:
    with GGUFFile.open(path) as file:
        Tokenizer.from_metadata(file.metadata)
        require_valid(file)


def imatrix(path: Path) -> None:
    squares = {
        name: SquaredActivations(np.ones((1, 8), np.float32), np.ones(1)) for name in ("blk.0.attn_q.weight", "b")
    }
    write_imatrix(path, ImportanceMatrix(squares, ["text"], 3))


def logits(path: Path) -> None:
    body = np.arange(2 * 8, dtype="<i4").tobytes() + bytes(2 * count_scored_tokens(8) * compute_row_width(5) * 2)
    path.write_bytes(MAGIC + struct.pack("<3i", 8, 5, 2) + body)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_tiny_model, gguf),
        (write_everything, GGUFFile.open),
        (imatrix, read_imatrix),
        (lambda path: path.write_bytes(legacy({"a.weight": (4, np.ones(8)), "b": (1, np.ones(3))}, b"")), read_imatrix),
        (logits, LogitsFile.open),
    ],
    ids=["model", "file", "imatrix", "old imatrix", "logits"],
)
def test_damaged_files_are_read_or_refused(write: Callable[[Path], Any], read: Callable[[Path], Any], tmp_path: Path):
    write(tmp_path / "valid.gguf")
    valid = (tmp_path / "valid.gguf").read_bytes()
    read(tmp_path / "valid.gguf")

    @EXAMPLES
    @given(damaged(valid, min(len(valid), 20000)))
    def whatever(content: bytes) -> None:
        (tmp_path / "x.gguf").write_bytes(content)
        refused_or_read(read, tmp_path / "x.gguf")

    whatever()


def refused_or_read(read: Callable[..., Any], *arguments: Any) -> None:
    """Expect an error of localllm in one line, of printable characters and spaces that paths may have."""
    try:
        read(*arguments)
    except LocalllmError as error:
        assert str(error).translate(SPACES).isprintable(), error


@pytest.mark.sampled
@pytest.mark.slow
@EXAMPLES
@given(st.dictionaries(st.sampled_from(["id", "line", "messages", "text", "é"]), JSON) | JSON, st.binary(max_size=20))
def test_damaged_records_are_read_or_refused(value: object, end: bytes):
    for data in (json.dumps(value).encode() + b"\n" + end, b'{"id": 1}\n' + end):
        for record in read_records(data):
            if not record.error:
                for prompts in (PromptBuilder("{text} {line}"), PromptBuilder(None)):
                    refused_or_read(prompts, record)


@EXAMPLES
@given(st.lists(st.tuples(st.sampled_from(["cache_gb", "aliases", "[model.x]", "[defaults", "x"]), st.text()) | JSON))
def test_damaged_settings_are_read_or_refused(parts: list[Any]):
    text = "\n".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in parts)
    refused_or_read(config.parse_settings, Path("config.toml"), text)


TEMPLATE = ["{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if m %}", "{% endif %}", "{{", "}}", "{%",
            "%}", "{#", "'", '"', "\\", "m", ".", "[", "]", "(", ")", "|", "tojson", "~", "**", "9", "\n"]  # fmt: skip


@EXAMPLES
@given(st.lists(st.sampled_from(TEMPLATE), max_size=12).map("".join))
def test_damaged_templates_are_rendered_or_refused(source: str):
    """Render here, and not first in another process."""

    def render() -> None:
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "require_safe_template", lambda _: None)
        refused_or_read(render)


@EXAMPLES
@given(st.text(), st.sampled_from(["int", "float", "bool", "str", "u8", ""]), st.text())
def test_damaged_overrides_are_parsed_or_refused(key: str, kind: str, value: str):
    refused_or_read(parse_override, f"{key}={kind}:{value}")
