"""The inputs of scripts/fuzz/fuzz.py: makers of damaged models, templates and localllm's own files, and their readers.

Each maker writes a damaged file drawn from random numbers; each reader uses it as a command would, and raises what that
raises.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.engine.engine import Engine
from localllm.engine.lower import steps, tape
from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import LocalllmError, UnsupportedError
from localllm.files.cache import prefix_files
from localllm.files.cache.checksummed_cache import read_checksummed, write_checksummed
from localllm.files.gguf.file import GGUFFile, map_file
from localllm.files.gguf.header import STRING, UINT64, HeaderReader
from localllm.files.gguf.writer import OutputTensor, PackedValue, write_gguf
from localllm.files.imatrix_file import load_imatrix
from localllm.files.logits_file import MAGIC, LogitsFile, compute_row_width, count_scored_tokens
from localllm.files.settings import parse_settings as parse_settings
from localllm.services import sessions
from localllm.services.inspection.validate import check_validity, require_finite_weights
from localllm.services.records.lines import PromptBuilder, read_records
from localllm.text.sandbox import compile_template, render_template
from localllm.text.tokenizer import Tokenizer

NUMBERS = [0, 1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 62, (1 << 63) - 1,
           (1 << 64) - 32, (1 << 64) - 1, -1, -(1 << 31)]  # fmt: skip
FLOATS = [0.0, -0.0, -1.0, 1e-45, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"), 0.5, 1e9]
TEXTS = ["", "a", "\x1b[2J", "x" * 70000, "\u202e", "llama", "gpt2", "t5", "yarn", "linear", "{{ 1 }}", "\0", "<0x41>"]
TEXT = "Hello, world! \n 123 \u72d0\u00e9 " + "a" * 70
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]


class Kind(NamedTuple):
    """make(draw, seeds, path) writes a file; read(path, draw) reads it, and raises what that raises."""

    weight: int  # how often
    make: Callable[[random.Random, list[Path], Path], Any]
    read: Callable[[Path, random.Random], Any]


# ---- models


def value(draw: random.Random) -> object:
    """Return a random metadata value of any type."""
    match draw.randrange(9):
        case 0:
            return draw.choice([-1, -5, 3])
        case 1:
            return draw.choice([n for n in NUMBERS if n >= 0])
        case 2 | 3:
            return np.float32(draw.choice(FLOATS))
        case 4:
            return draw.choice(TEXTS)
        case 5:
            return draw.random() < 0.5
        case 6:
            return np.array([draw.choice(FLOATS) for _ in range(draw.randrange(1, 9))], np.float32)
        case 7:
            return np.array([draw.randrange(-9, 99) for _ in range(draw.randrange(1, 400))], np.int32)
    return [draw.choice(TEXTS) for _ in range(draw.randrange(1, 9))]


def near(draw: random.Random, old: Any) -> object:
    """Return a random value, mostly of the same type."""
    if draw.random() < 0.3 or isinstance(old, list | np.ndarray):
        return value(draw)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return max(0, draw.choice([old - 1, old + 1, 2 * old, old // 2, *NUMBERS[:8]]))
    if isinstance(old, float):
        return np.float32(draw.choice([*FLOATS, 2 * old, old / 2]))
    return draw.choice(TEXTS)


def model(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a valid file with some of its metadata and tensors changed."""
    file = GGUFFile.open(draw.choice(seeds))
    keys: dict[str, Any] = {key: PackedValue(item.tobytes()) for key, item in file.packed.items()}
    tensors = dict(file.tensors)
    for _ in range(draw.randint(1, 3)):
        key, name = draw.choice(list(keys)), draw.choice(list(tensors))
        match draw.randrange(10):
            case 0 | 1 | 2 | 3:
                keys[key] = near(draw, file.metadata.get(key))
            case 4:
                del keys[key]
            case 5:
                arch = file.metadata["general.architecture"]
                others = ["rope.scaling.type", "expert_count", "attention.sliding_window", "vocab_size", "x"]
                keys[f"{arch}.{draw.choice(others)}"] = value(draw)
            case 6 if len(tensors) > 1:
                del tensors[name]
            case 7:
                tensors[draw.choice([name + "x", "", "blk.9.attn_q.weight", "a\nb", "rope_freqs.weight"])] = tensors[
                    name
                ]
            case 8:
                tensors[name] = tensors[draw.choice(list(tensors))]
            case _:
                keys["tokenizer.chat_template"] = "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))
    outputs = [OutputTensor(name, t.format, t.shape, (np.ascontiguousarray(t.data),)) for name, t in tensors.items()]
    keys.pop("general.alignment", None)
    write_gguf(path, {key: item for key, item in keys.items() if key}, outputs)


def vocabulary(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a valid file with some items of its vocabulary changed."""
    file = GGUFFile.open(draw.choice([seed for seed in seeds if not seed.name.startswith("mmproj")]))
    keys: dict[str, Any] = {key: PackedValue(item.tobytes()) for key, item in file.packed.items()}
    names = [key for key in keys if key.startswith("tokenizer.ggml.")]
    for _ in range(draw.randint(1, 2)):
        key = draw.choice(names)
        keys[key] = changed_items(draw, file.metadata[key])
    outputs = [
        OutputTensor(name, t.format, t.shape, (np.ascontiguousarray(t.data),)) for name, t in file.tensors.items()
    ]
    keys.pop("general.alignment", None)
    write_gguf(path, keys, outputs if draw.random() < 0.3 else [])


def changed_items(draw: random.Random, old: Any) -> object:
    """Change a few items of an array, or its length; replace a value that is no array."""
    if not isinstance(old, list | np.ndarray) or not len(old):
        return near(draw, old)
    items = list(old) if isinstance(old, list) else old.copy()
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(items))
        if isinstance(items, list):
            items[place] = draw.choice([*TEXTS, draw.choice(items), items[place] + " b", "a b", "\xff" * 9])
        elif items.dtype.kind == "f":
            items[place] = draw.choice(FLOATS)
        else:
            items[place] = draw.randrange(0, 256) if items.dtype.kind == "u" else draw.randrange(-2, 9)
    if draw.random() < 0.2:
        items = items[: draw.randrange(len(items) + 1)]
    return items


def damaged(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a valid file with some bytes changed, most of them in its header."""
    data = bytearray(draw.choice(seeds).read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(min(len(data), 24000))
        match draw.randrange(5):
            case 0:
                data[place] ^= 1 << draw.randrange(8)
            case 1:
                data[place : place + 8] = struct.pack("<Q", draw.choice(NUMBERS) % (1 << 64))
            case 2:
                data[place : place + 4] = struct.pack("<I", draw.choice(NUMBERS) % (1 << 32))
            case 3:
                del data[place : place + draw.randrange(1, 64)]
            case 4:
                data = data[: max(1, place)] if draw.random() < 0.3 else data
    path.write_bytes(data)


class Places(HeaderReader):
    """Return the places of the numbers of a header: (first byte, how many)."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.places: list[tuple[int, int]] = []

    def read_number(self, kind: struct.Struct) -> Any:
        self.places.append((self.position, kind.size))
        return super().read_number(kind)

    def read_array(self, depth: int, key: str = "") -> Any:
        start = self.position
        found = super().read_array(depth, key)
        if self.data[start] == STRING:  # lengths of the first few
            position = start + 12
            for _ in range(min(20, UINT64.unpack_from(self.data, start + 4)[0])):
                self.places.append((position, 8))
                position += 8 + UINT64.unpack_from(self.data, position)[0]
        return found


@cache
def places(seed: Path) -> list[tuple[int, int]]:
    reader = Places(map_file(str(seed)), str(seed))
    reader.read()
    return reader.places


def field(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a valid file with one to three numbers of its header changed.

    Counts, lengths, types, dimensions, offsets.
    """
    seed = draw.choice(seeds)
    data = bytearray(seed.read_bytes())
    for _ in range(draw.choice([1, 1, 2, 3])):
        place, size = draw.choice(places(seed))
        old = int.from_bytes(data[place : place + size], "little")
        new = draw.choice([*NUMBERS, old + 1, old - 1, 2 * old, old + 32, old ^ 1 << draw.randrange(8 * size)])
        data[place : place + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    path.write_bytes(data)


def weights(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a valid header over random tensor data."""
    seed = draw.choice(seeds)
    data = bytearray(seed.read_bytes())
    start = places(seed)[-1][0] + 64
    for _ in range(draw.choice([1, 4, 40])):
        place = draw.randrange(start, len(data) - 64)
        match draw.randrange(4):
            case 0:
                data[place : place + 4] = struct.pack("<f", draw.choice(FLOATS))
            case 1:
                data[place : place + 2] = struct.pack("<H", draw.choice([0x7C00, 0xFC00, 0x7E00, 0x0001, 0xFFFF]))
            case 2:
                data[place : place + 64] = draw.randbytes(64)
            case 3:
                data[place : place + 64] = bytes([draw.choice([0, 0xFF, 0x7F, 0x80])]) * 64
    path.write_bytes(data)


def read_model(path: Path, draw: random.Random) -> None:
    """Open a file as every command does, and some as `run` and `inspect --check` do, between guard pages."""
    file = GGUFFile.open(path)
    if draw.random() < 0.2:
        for key in file.metadata:
            _ = file.metadata[key]
    found = check_validity(file)
    if found.problem:
        raise found.problem
    tokens = [1, 2, 3]
    if draw.random() < 0.2 and "tokenizer.ggml.tokens" in file.metadata:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        tokens = tokenizer.encode(TEXT, special=True, bos=True)
        tokenizer.decode(tokens)
        if tokenizer.chat_template:
            render(tokenizer.chat_template)
    if file.tensors and draw.random() < 0.1:
        answer(file, tokens, draw)


def read_weights(path: Path, draw: random.Random) -> None:
    """Read all weights, or run the model."""
    file = GGUFFile.open(path)
    if draw.random() < 0.7:
        return require_finite_weights(file)
    return answer(file, [1, 2, 3], draw)


def answer(file: GGUFFile, tokens: list[int], draw: random.Random) -> None:
    """Compute a few tokens by kernels or the reference, or encode an image, in buffers followed by guard pages."""
    import guarded  # of the tests

    found = check_validity(file)
    ids = [token for token in tokens[:8] if found.hyperparameters and token < found.hyperparameters.vocab_size] or [0]
    backend = "reference" if draw.random() < 0.03 else "cpu"
    if backend == "cpu":
        file.tensors = {n: replace(t, data=guarded.guarded_copy(t.data)) for n, t in file.tensors.items()}
    before = tape.allocate_buffers, steps.pad_columns
    tape.allocate_buffers = guarded.place_buffers
    steps.pad_columns = lambda vector: guarded.guarded_copy(before[1](vector))
    try:
        if found.vision:
            return look(file, draw)
        engine = Engine(file, EngineOptions(threads=1, context=64, backend=backend))
        try:
            sequence = engine.sequence()
            sequence.append(ids, "all", draw.random() < 0.5)
            sequence.append(ids[:1])
        finally:
            engine.close()
    finally:
        tape.allocate_buffers, steps.pad_columns = before
        guarded.keep.clear()


def look(file: GGUFFile, draw: random.Random) -> None:
    """Encode an image with a projector."""
    from PIL import Image

    reader = VisionEncoder(file, EngineOptions(threads=1))
    try:
        image = Image.new("RGB", (draw.randrange(1, 300), draw.randrange(1, 300)), (9, 99, 199))
        reader.read(reader.family.prepare(reader.hyperparameters, image).pictures[-1])
    finally:
        reader.close()


# ---- templates

PIECES = [
    *["{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ range(9)|list }}", "{% if x %}", "{% endif %}"],
    *["{% set x = 'a' * 999 %}", "{{x ~ x}}", "|map('upper')", "{{ '%9d' % 1 }}", "{% macro f() %}", "{% endmacro %}"],
    *["{{ f() }}", "{{ x.replace('a', x) }}", "(", ")", "[", "]", "{{", "}}", "{%", "%}", "x", "'", "|tojson", "~"],
]  # fmt: skip
ATOMS = ["messages", "x", "1", "'a'", "999999999", "[]", "{}", "none", "range(9999)", "range(99999)|list",
         "namespace()", "f", "loop", "self", "dict", "2.5", "'%s%d'", "'{0.x}{:9}'", "messages[0]", "true", "caller",
         "'\\ud800'", "joiner", "lipsum", "''.__class__", "x.__init__", "('a' * 99999)", "strftime_now"]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is"]
FILTERS = ["tojson", "tojson(indent=4)", "map('upper')", "list", "join", "join('a' * 999)", "replace('a', 'b' * 99)",
           "length", "sum", "sort", "groupby('a')", "batch(3)", "format(1)", "default(1)", "items", "string", "int",
           "selectattr('a')", "map(attribute='a')", "select", "first", "last", "unique", "reverse", "indent(99)",
           "trim", "abs", "dictsort", "escape", "safe", "round", "float", "max", "truncate", "title",
           "map('list')", "attr('__class__')"]  # fmt: skip
METHODS = ["split()", "join(['a'] * 999)", "format(1, 2, a=3)", "replace('', 'aaaa')", "items()", "get('a')",
           "upper()", "append(1)", "update({})", "encode()", "ljust(999)", "content", "__class__", "__globals__",
           "index('a')"]  # fmt: skip


def expression(draw: random.Random, depth: int) -> str:
    """Return a Jinja expression."""
    if depth <= 0:
        return draw.choice(ATOMS)
    inner = expression(draw, depth - 1)
    match draw.randrange(7):
        case 0:
            return f"({inner} {draw.choice(OPERATORS)} {expression(draw, depth - 2)})"
        case 1:
            return f"{inner}|{draw.choice(FILTERS)}"
        case 2:
            return f"({inner}).{draw.choice(METHODS)}"
        case 3:
            return f"{inner}[{expression(draw, depth - 2)}]"
        case 4:
            return f"[{inner}, {expression(draw, depth - 2)}]"
        case 5:
            return f"f({inner})"
    return draw.choice(ATOMS)


def statement(draw: random.Random, depth: int) -> str:
    """Return a random Jinja statement."""
    if depth <= 0:
        return "{{ " + expression(draw, 3) + " }}"
    inner = "".join(statement(draw, depth - 1) for _ in range(draw.randint(1, 2)))
    some = expression(draw, draw.randrange(4))
    match draw.randrange(8):
        case 0:
            return "{% for x in " + some + " %}" + inner + "{% endfor %}"
        case 1:
            return "{% for x in " + some + " if " + expression(draw, 2) + " recursive %}" + inner + "{% endfor %}"
        case 2:
            return "{% macro f(x=1) %}" + inner + "{% endmacro %}{{ f() }}"
        case 3:
            return "{% set x = " + some + " %}" + inner
        case 4:
            return "{% set x %}" + inner + "{% endset %}"
        case 5:
            return "{% if " + some + " %}" + inner + "{% else %}b{% endif %}"
        case 6:
            return "{% filter " + draw.choice(FILTERS) + " %}" + inner + "{% endfilter %}"
    return "{% call f() %}" + inner + "{% endcall %}{% set ns = namespace(x=" + some + ") %}{% set ns.x = ns %}"


def template(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a template made by a grammar, or of random pieces."""
    made = statement(draw, draw.randrange(5)) if draw.random() < 0.8 else "".join(draw.choices(PIECES, k=20))
    path.write_text(made, errors="replace")


def read_template(path: Path, draw: random.Random) -> None:
    render(path.read_text())


def render(source: str) -> None:
    """Render a template in this process, without the probe; any of the template's own errors is accepted."""
    try:
        render_template(compile_template(source), {"messages": MESSAGES, "add_generation_prompt": True, "x": ["a"]})
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedError("the template fails") from error


# ---- files of our own


def bytes_changed(draw: random.Random, valid: bytes) -> bytes:
    """Change a few bytes, or remove or double a range, or truncate."""
    data = bytearray(valid)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(max(1, len(data)))
        match draw.randrange(6):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                data[place : place + 4] = struct.pack("<I", draw.choice(NUMBERS) % (1 << 32))
            case 2:
                data[place : place + 8] = struct.pack("<Q", draw.choice(NUMBERS) % (1 << 64))
            case 3:
                del data[place : place + draw.randint(1, 64)]
            case 4:
                data[place:place] = data[place : place + draw.randint(1, 64)]
            case 5:
                del data[place + 1 :]
    return bytes(data)


def anything(draw: random.Random, depth: int = 3) -> Any:
    """Return a random JSON value."""
    match draw.randrange(8 if depth else 5):
        case 0:
            return draw.choice([*NUMBERS, *FLOATS[:6], 10**400])
        case 1:
            return draw.choice(TEXTS)
        case 2:
            return draw.choice([None, True, False])
        case 3 | 4:
            return draw.choice(["user", "assistant", "system", 1])
        case 5 | 6:
            names = ["session", "model", "settings", "created", "role", "content", "id", "messages", "name", "path"]
            return {draw.choice(names): anything(draw, depth - 1) for _ in range(draw.randrange(4))}
    return [anything(draw, depth - 1) for _ in range(draw.randrange(4))]


def session(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a session with a line or some bytes changed."""
    lines = [sessions.SavedChat().serialize().strip(), *(json.dumps(line).encode() for line in MESSAGES)]
    if draw.random() < 0.5:
        lines[draw.randrange(len(lines))] = json.dumps(anything(draw)).encode()
        path.write_bytes(b"\n".join(lines))
    else:
        path.write_bytes(bytes_changed(draw, b"\n".join(lines) + b"\n"))


def read_session(path: Path, draw: random.Random) -> None:
    sessions.parse_session(path.read_bytes(), "the session")


def records(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a result file of `map`, damaged."""
    lines = [json.dumps({"id": 1, "text": "a"}), json.dumps(anything(draw)), json.dumps(anything(draw))]
    path.write_bytes(bytes_changed(draw, "\n".join(lines).encode()))


def read_records_of(path: Path, draw: random.Random) -> None:
    for record in read_records(path.read_bytes(), draw.choice(["", "x.jsonl"])):
        if not record.error:
            for prompts in (PromptBuilder("{text} {line}"), PromptBuilder(None)):
                with suppress(LocalllmError):
                    prompts(record)


def config(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a config.toml."""
    lines = ["cache_gb = 2", "[aliases]", 'small = "a.gguf"', "[defaults]", "threads = 4", "[command.run]", "temp = 1"]
    lines += [f"x = {json.dumps(anything(draw))}", "[model]", "[model.x]", "[[command]]"]
    path.write_bytes(bytes_changed(draw, "\n".join(draw.sample(lines, draw.randrange(1, 9))).encode()))


def read_config(path: Path, draw: random.Random) -> None:
    parse_settings(path, path.read_bytes().decode(errors="replace"))


def imatrix(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write an importance matrix in either layout, with a number, a name or some bytes changed."""
    if draw.random() < 0.5:
        name = draw.choice([b"a.weight", b"", b"\xff", b"x" * 999])
        values = np.array([draw.choice([*FLOATS, 1.0]) for _ in range(draw.randrange(1, 9))], "<f4").tobytes()
        data = struct.pack("<ii", draw.choice([1, 1, 2, -1]), len(name)) + name
        data += struct.pack("<ii", draw.choice([1, 0, -1, 9]), len(values) // 4) + values + struct.pack("<i", 7)
        path.write_bytes(data if draw.random() < 0.5 else bytes_changed(draw, data))
        return
    sums = np.array([[draw.choice([1.0, 2.0, *FLOATS])] * 8] * draw.choice([1, 1, 3]), np.float32)
    counts = np.array([draw.choice([1.0, 9.0, *FLOATS])] * draw.choice([1, 1, 2]), np.float32)
    keys = {"general.type": "imatrix", draw.choice(["imatrix.chunk_size", "imatrix.datasets"]): value(draw)}
    names = draw.choice([(".in_sum2", ".counts"), (".in_sum2", ".count"), (".in_sum", ".counts")])
    write_gguf(
        path,
        keys,
        [OutputTensor.from_array("a.weight" + end, data) for end, data in zip(names, (sums, counts), strict=True)],
    )
    if draw.random() < 0.5:
        path.write_bytes(bytes_changed(draw, path.read_bytes()))


def read_imatrix_of(path: Path, draw: random.Random) -> None:
    load_imatrix(path)


def logits(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a file of logits with its counts or some bytes changed."""
    size, vocab, count = (draw.choice([right, right, *NUMBERS]) for right in (8, 5, 2))
    body = np.arange(2 * 8, dtype="<i4").tobytes() + bytes(2 * count_scored_tokens(8) * compute_row_width(5) * 2)
    data = MAGIC + struct.pack("<3I", *(number % (1 << 32) for number in (size, vocab, count))) + body
    path.write_bytes(data if draw.random() < 0.5 else bytes_changed(draw, data))


def read_logits(path: Path, draw: random.Random) -> None:
    found = LogitsFile.open(path)
    _ = found.rows.sum(), found.chunks.sum()


KEY = "0123456789abcdef" * 2


@cache
def kept_prompt() -> bytes:
    """Return the content of a valid file of the prefix cache."""
    parts = {"k": np.arange(64, dtype=np.uint8), "v": np.arange(99, dtype=np.uint8)}
    prefix_files.write_prefix(KEY, prefix_files.PrefixChunkInfo("m", 64, ""), parts)
    return (prefix_files.get_folder() / KEY).read_bytes()


def prompt(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a damaged file into the prefix cache; some have valid checksums over a wrong header."""
    valid = kept_prompt()
    if draw.random() < 0.5:
        parts = [["k", draw.choice([64, *NUMBERS]), 0], anything(draw)][: draw.randint(1, 2)]
        about = draw.choice([{"model": "m", "end": 64, "before": ""}, anything(draw)])
        told = draw.choice([{"key": KEY, "about": about, "parts": parts}, anything(draw)])
        header = json.dumps(told).encode()
        made = struct.pack("<I", len(header)) + header + struct.pack("<I", zlib.crc32(header))
        data = prefix_files.MAGIC + made + bytes(draw.choice([0, 64, 99]))
    else:
        data = bytes_changed(draw, valid)
    (prefix_files.get_folder() / KEY).write_bytes(data)


def read_prompt(path: Path, draw: random.Random) -> None:
    kept = prefix_files.open_prefix(KEY)
    if kept is None:
        raise UnsupportedError("not whole")
    with kept:
        for name in kept.parts:
            try:
                kept.read(name)
            except ValueError as error:
                raise UnsupportedError("damaged") from error


def machine_code(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Write a changed object file, or another kernel's."""
    folder = path.parent / "objects"
    write_checksummed(folder / "a" / "one.o", b"code" * 50)
    data = (folder / "a" / "one.o").read_bytes()
    (folder / "a" / "two.o").write_bytes(data)
    (folder / "a" / "one.o").write_bytes(bytes_changed(draw, data))


def read_machine_code(path: Path, draw: random.Random) -> None:
    for name in ("one.o", "two.o"):
        if read_checksummed(path.parent / "objects" / "a" / name) not in (None, b"code" * 50):
            raise AssertionError("machine code that nobody made")
    if read_checksummed(path.parent / "objects" / "a" / "two.o") is not None:
        raise AssertionError("machine code under another name")


KINDS = {
    "model": Kind(25, model, read_model),
    "field": Kind(28, field, read_model),
    "bytes": Kind(8, damaged, read_model),
    "vocabulary": Kind(16, vocabulary, read_model),
    "weights": Kind(3, weights, read_weights),
    "template": Kind(6, template, read_template),
    "imatrix": Kind(5, imatrix, read_imatrix_of),
    "logits": Kind(3, logits, read_logits),
    "prompt": Kind(3, prompt, read_prompt),
    "session": Kind(3, session, read_session),
    "records": Kind(2, records, read_records_of),
    "config": Kind(1, config, read_config),
    "code": Kind(1, machine_code, read_machine_code),
}
