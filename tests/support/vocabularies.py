"""Tiny vocabularies of every kind, with what llama.cpp makes of odd texts: see scripts/record/record_tokens.py.

Their merges and pieces come from the first pages of a play of 1608 (prose.txt, public domain), as the script learned
them; what else they have is here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from project import GOLDENS, SUPPORT
from tiny_model import byte_pieces

from localllm.files.gguf.writer import build_header

PROSE = (SUPPORT / "prose.txt").read_text()
RECORDED = GOLDENS / "tokens.json"
GIVEN: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# By name of the pre-tokenizer: the ids of the beginning and the end among SPECIAL.
BYTE_LEVEL = {"gpt-2": (1, 1), "llama-bpe": (0, 3), "qwen2": (1, 3), "starcoder": (0, 1), "deepseek-llm": (0, 1)}
SENTENCE_PIECE = {"llama-spm": {}, "phi-3": {"general.name": "phi-3"}, "no-prefix": {"add_space_prefix": False}}
NAMES = [*BYTE_LEVEL, *SENTENCE_PIECE, "rwkv", "plamo2"]


def byte_level(merges: list[str], pre: str, ends: tuple[int, int] = (0, 1), more: tuple[str, ...] = ()) -> dict:
    """Return a byte-level vocabulary; more: pieces without a merge."""
    pieces = [*byte_pieces(), *(merge.replace(" ", "", 1) for merge in merges), *more]
    kinds = [CONTROL] * 4 + [USER_DEFINED] * 2
    return with_prefix({
        "model": "gpt2", "pre": pre, "tokens": [*pieces, *SPECIAL], "merges": merges,
        "token_type": [NORMAL] * len(pieces) + kinds,
        "bos_token_id": len(pieces) + ends[0], "eos_token_id": len(pieces) + ends[1],
    })  # fmt: skip


def sentence_piece(pieces: list[str], **more: Any) -> dict:
    """Return a SentencePiece vocabulary of pieces in the order of their scores."""
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    special = ["<|user|>", "<|endoftext|>", "<|end|>", "<extra>"]
    scores = [0.0] * len(first) + [-1.0 - number for number in range(len(pieces))] + [0.0] * len(special)
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL] * 3 + [USER_DEFINED]
    return with_prefix({
        "model": "llama", "pre": "default", "tokens": [*first, *pieces, *special], "scores": scores,
        "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more,
    })  # fmt: skip


def world(pieces: list[str]) -> dict:
    """Return an RWKV vocabulary: bytes, and pieces as Python writes bytes."""
    texts = [bytes([byte]) for byte in range(256)] + [piece.replace("▁", " ").encode() for piece in pieces]
    texts = [*dict.fromkeys([*texts, b"\n\n", "Привет".encode(), "日本".encode()[:4], b"'s", b"\\x"])]
    written = [repr(text)[2:-1] for text in texts]
    kinds = [CONTROL] + [NORMAL] * len(written) + [UNUSED] * 2
    tokens = ["<|world|>", *written, "[PAD1]", "[PAD2]"]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "eot_token_id": 1 + texts.index(b"\n\n")}
    return with_prefix({"model": "rwkv", "tokens": tokens, "token_type": kinds, **ends})


def plamo(pieces: list[str]) -> dict:
    """Return a PLaMo vocabulary whose scores are often equal."""
    first = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    plain = [*dict.fromkeys(piece.replace("▁", " ") for piece in pieces)]
    scores = [0.0] * len(first) + [-4.0 - number // 50 / 7 - len(piece) / 9 for number, piece in enumerate(plain)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(plain)
    return with_prefix({"model": "plamo2", "tokens": [*first, *plain], "scores": scores, "token_type": kinds})


def with_prefix(fields: dict[str, Any]) -> dict[str, Any]:
    dtypes = {"token_type": np.int32, "scores": np.float32}
    fields = {key: np.array(value, dtypes[key]) if key in dtypes else value for key, value in fields.items()}
    return {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def metadata(name: str) -> dict[str, Any]:
    """Return the metadata of a vocabulary among NAMES."""
    if name in ("rwkv", "plamo2"):
        return (world if name == "rwkv" else plamo)(GIVEN["pieces"])
    if name in SENTENCE_PIECE:
        return sentence_piece(GIVEN["pieces"], **SENTENCE_PIECE[name])
    return byte_level(GIVEN["merges"], name, BYTE_LEVEL[name], ("Ġ1234", "brillig"))


def cuts(pre: str, **more: Any) -> dict[str, Any]:
    """Return a byte-level vocabulary that merges any two neighbours unless a pre-tokenizer cuts them."""
    return byte_level(GIVEN["bigrams"], pre) | with_prefix(more)


def write_vocabulary(metadata: dict[str, Any], path: Path) -> Path:
    """Write a file without tensors, whose vocabulary llama.cpp reads, and return its path."""
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 1, "rope.dimension_count": 64}
    fields = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in sizes.items()}}
    path.write_bytes(build_header({**fields, "llama.attention.layer_norm_rms_epsilon": 1e-5, **metadata}, []))
    return path
