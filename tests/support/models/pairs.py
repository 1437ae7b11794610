"""A checkpoint of CLIP, tiny and random, under transformers' names: what makes vectors of pictures and of texts."""

import hashlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import write_json, write_safetensors

from localllm.text.clip_words import END, START, WORDS

from .numbers import Numbers

PROSE = Path(__file__).resolve().parents[1] / "prose.txt"
MERGES = 250
TEXT: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
        "max_position_embeddings": 24, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": 56, "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}  # fmt: skip
OUT = 32
TEXTS = [
    "a cat", "A photo of two  DOGS,\n barking!", "", "Speak, speak. We know't 't we'll", "naïve café Ünïcode 日本 42",
    "the people the citizens of the people", "😀 ok",
]  # fmt: skip
SIZES = (131, 90), (33, 100), (56, 56), (200, 61)  # of pictures: columns, rows


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces in the order of their merges, as OpenAI's: bytes, bytes that end words, merges, start and end."""
    from tokenizers import Regex, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "removed", invert=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    found = Counter(word for word, _ in cut.pre_tokenize_str(PROSE.read_text()[:8000].lower()))
    words = [([*word[:-1], word[-1] + "</w>"], count) for word, count in sorted(found.items())]
    pieces, merges = [*letters, *(letter + "</w>" for letter in letters)], list[tuple[str, str]]()
    while len(merges) < MERGES:
        counts = Counter[tuple[str, str]]()
        for symbols, count in words:
            for pair in pairwise(symbols):
                counts[pair] += count
        best = max(sorted(counts), key=counts.__getitem__)
        merges.append(best)
        pieces.append("".join(best))
        words = [(merged(symbols, best), count) for symbols, count in words]
    return {piece: number for number, piece in enumerate([*pieces, START, END])}, merges


def merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    done = list[str]()
    for symbol in symbols:
        if done and (done[-1], symbol) == pair:
            done[-1] += symbol
        else:
            done.append(symbol)
    return done


def tensors(size: int) -> dict[str, np.ndarray]:
    """By transformers' names; size: of the vocabulary."""
    shapes = {"text_projection.weight": (OUT, 48), "visual_projection.weight": (OUT, 64), "logit_scale": ()}
    shapes |= {"text_model.embeddings.token_embedding.weight": (size, 48),
               "text_model.embeddings.position_embedding.weight": (24, 48),
               "vision_model.embeddings.class_embedding": (64,),
               "vision_model.embeddings.patch_embedding.weight": (64, 3, 14, 14),
               "vision_model.embeddings.position_embedding.weight": (17, 64)}  # fmt: skip
    norms = [
        ("text_model.final_layer_norm", 48),
        ("vision_model.pre_layrnorm", 64),
        ("vision_model.post_layernorm", 64),
    ]
    for tower, sizes in (("text_model", TEXT), ("vision_model", VISION)):
        width, hidden = sizes["hidden_size"], sizes["intermediate_size"]
        for layer in range(sizes["num_hidden_layers"]):
            name = f"{tower}.encoder.layers.{layer}"
            norms += [(f"{name}.layer_norm1", width), (f"{name}.layer_norm2", width)]
            matrices = [(f"self_attn.{part}_proj", (width, width)) for part in ("q", "k", "v", "out")]
            for part, shape in [*matrices, ("mlp.fc1", (hidden, width)), ("mlp.fc2", (width, hidden))]:
                shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
    shapes |= {f"{name}.{part}": (width,) for name, width in norms for part in ("weight", "bias")}
    return {name: numbers(name, shape) for name, shape in shapes.items()}


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    made = Numbers(0, "pair", name)
    if "norm" in name and name.endswith("weight"):
        return made.uniform(shape, 0.5, 1.5)
    deviation = 0.5 if "embedding" in name or len(shape) == 1 else 1.3 * float(np.prod(shape[1:])) ** -0.5
    return made.normal(shape, deviation)


def write_pair(folder: Path, **changed: object) -> Path:
    """Return a checkpoint; changed: in config.json's parts."""
    folder.mkdir(exist_ok=True)
    ids, merges = vocabulary()
    text = TEXT | {"vocab_size": len(ids), "bos_token_id": ids[START], "eos_token_id": ids[END]}
    config = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": OUT}
    write_json(folder / "config.json", config | {"text_config": text, "vision_config": VISION} | changed)
    write_json(folder / "vocab.json", ids)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n", encoding="utf-8")
    prepared = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "do_center_crop": True,
                "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "resample": 3,
                "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
                "image_processor_type": "CLIPImageProcessor"}  # fmt: skip
    write_json(folder / "preprocessor_config.json", prepared)
    write_safetensors(folder / "model.safetensors", [(name, "F32", array) for name, array in tensors(len(ids)).items()])
    return folder


def pictures() -> list[np.ndarray]:
    """uint8 [rows, columns, 3] each: blocks of 8 pixels."""
    made = []
    for columns, rows in SIZES:
        blocks = Numbers(0, "picture", columns, rows).raw((rows // 8 + 1) * (columns // 8 + 1) * 3)
        blocks = blocks.reshape(rows // 8 + 1, columns // 8 + 1, 3)
        made.append(np.ascontiguousarray(np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:rows, :columns]))
    return made


def digest() -> str:
    """Of all of it."""
    ids, merges = vocabulary()
    key = hashlib.sha256(repr((TEXT, VISION, OUT, TEXTS, SIZES, [*ids], merges)).encode())
    for name, array in tensors(len(ids)).items():
        key.update(name.encode() + array.tobytes())
    return key.hexdigest()
