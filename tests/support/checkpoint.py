"""A tiny random checkpoint as Hugging Face's tools save one: config.json, safetensors, tokenizer.json."""

import itertools
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from tiny_model import CHATML, MERGES, SPECIAL_TOKENS, vocabulary

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(vocabulary()) + 5,  # the embedding of many models has more rows than there are tokens
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 2,
}


# Of Qwen 4's sequences of tokens: by which numbers tokens are multiplied, and which rows of a table hashes have.
OF_HASHES = {
    "layer_multipliers": (0x2C9277B5D1A3, 0x5851F42D4C95, 0x14057B7EF767),
    "ngram_heads_vocab_sizes": (53, 59, 61, 67),
    "ngram_heads_offsets": (0, 53, 112, 173),
}


def write_checkpoint(folder: Path, config: Mapping[str, Any] = {}, dtype: str = "F32", files: int = 1) -> Path:
    """Write a checkpoint with changes of CONFIG, its weights in `files` files; return the folder."""
    folder.mkdir(exist_ok=True)
    settings = CONFIG | config
    write_json(folder / "config.json", settings)
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2]})
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    weights = [(name, dtype, array) for name, array in make_weights(settings).items()]
    if files == 1:
        write_safetensors(folder / "model.safetensors", weights)
        return folder
    index = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_safetensors(folder / name, weights[number::files])
        index |= {tensor: name for tensor, _, _ in weights[number::files]}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    return folder


def write_family(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]], dtype: str = "F32") -> Path:
    """Write a checkpoint of any architecture with random weights of these shapes; return the folder."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer())
    special = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2]}
    write_json(folder / "tokenizer_config.json", special | {"tokenizer_class": "PreTrainedTokenizerFast"})
    tensors = [(name, *random_tensor(name, tuple(shape), dtype)) for name, shape in shapes.items()]
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def spelled_out(together: Mapping[str, str]) -> dict[str, list[int]]:
    """Expand ranges in names, such as 0-3 for 0, 1, 2 and 3; return shapes by name."""
    shapes: dict[str, list[int]] = {}
    for names, shape in together.items():
        parts = re.split(r"(?<=\.)(\d+-\d+)(?=\.)", names)
        choices = [range(*span(part)) if number % 2 else [part] for number, part in enumerate(parts)]
        shapes |= {"".join(map(str, name)): [*map(int, shape.split())] for name in itertools.product(*choices)}
    return shapes


def span(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first), int(last) + 1


def random_tensor(name: str, shape: tuple[int, ...], dtype: str = "F32") -> tuple[str, np.ndarray]:
    """Return a tensor's type and values, the same for the same name."""
    random = np.random.default_rng(crc32(name.encode()))
    if name.endswith("_blocks"):
        return "U8", random.integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):
        return "U8", random.integers(120, 125, shape, np.uint8)
    if constants := next((numbers for end, numbers in OF_HASHES.items() if name.endswith(end)), None):
        return "I64", np.array(constants[: shape[0]])
    return dtype, random_numbers(random, shape)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Change an object in a file; None removes a key."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in content.items() if value is not None})


def make_weights(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return random weights under Hugging Face's names: float32 values that F16 and BF16 hold exactly."""
    random = np.random.default_rng(0)
    width, hidden, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_attention_heads"]
    queries = heads * (settings.get("head_dim") or width // heads)
    keys = queries // heads * settings["num_key_value_heads"]

    def normal(*shape: int) -> np.ndarray:
        return random_numbers(random, shape)

    weights = {"model.embed_tokens.weight": normal(settings["vocab_size"], width), "model.norm.weight": normal(width)}
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(width) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows, columns in (
            *(("self_attn.q_proj", queries, width), ("self_attn.k_proj", keys, width)),
            *(("self_attn.v_proj", keys, width), ("self_attn.o_proj", width, queries)),
            *(("mlp.gate_proj", hidden, width), ("mlp.up_proj", hidden, width), ("mlp.down_proj", width, hidden)),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns)
            if settings.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
                weights[f"{prefix}{name}.bias"] = normal(rows)
    if not settings.get("tie_word_embeddings"):
        weights["lm_head.weight"] = normal(settings["vocab_size"], width)
    return weights


def random_numbers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 values that F16 and BF16 hold exactly; vectors are positive, as norms are."""
    scale = 0.25 if len(shape) <= 1 else 1.5 * shape[-1] ** -0.5
    numbers = np.asarray(random.normal(0.5 if len(shape) <= 1 else 0, scale, shape), np.float32)
    return np.round(numbers * 128) / np.float32(128)


def write_safetensors(path: Path, tensors: list[tuple[str, str, np.ndarray]], **changes: Any) -> None:
    """Write tensors as (name, type, values), with changes of the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, dtype, array in tensors:
        chunk = encoded(array, dtype)
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    text = json.dumps(header | changes).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def encoded(array: np.ndarray, dtype: str) -> bytes:
    """Return values as bytes; BF16 is the upper half of float32."""
    if dtype == "BF16":
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I8": np.int8}
    return array.astype(kinds.get(dtype, np.uint8)).tobytes()


def tokenizer(**changes: Any) -> dict[str, Any]:
    """Return a byte-level tokenizer.json with GPT-2's pre-tokenizer."""
    pieces = vocabulary()
    return {
        "version": "1.0",
        "added_tokens": [added_token(token, text) for token, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    } | changes


def added_token(token: int, text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return {"id": token, "content": text, "special": special, **flags}


def sentencepiece(
    pieces: list[str], scores: list[float], types: list[int], kind: int = 2, has_bytes: bool = False
) -> bytes:
    """Return a tokenizer.model (a protobuf message); kind 2 is BPE; has_bytes: there is a piece for each byte."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    def chunk(field: int, data: bytes) -> bytes:
        return bytes([field << 3 | 2]) + number(len(data)) + data

    data = b""
    for piece, score, type_ in zip(pieces, scores, types, strict=True):
        data += chunk(1, chunk(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + number(type_))
    fallback = number(35 << 3) + b"\x01" if has_bytes else b""
    return data + chunk(2, b"\x18" + number(kind) + fallback) + chunk(3, chunk(1, b"identity") + b"\x18\x01")
